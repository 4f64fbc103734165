# SPDX-License-Identifier: Apache-2.0
# moec_add_packaged(TARGET): TARGET_packaged, the same objects linked as packages carry them, into
# lib/packaged: stripped, and for an older glibc than this machine's (scripts/link_packaged.sh).
function(moec_add_packaged target)
  get_target_property(objects ${target} SOURCES)
  add_library(${target}_packaged SHARED EXCLUDE_FROM_ALL ${objects})
  foreach(name IN ITEMS LINK_OPTIONS LINK_LIBRARIES LINK_DEPENDS LINKER_LANGUAGE VERSION SOVERSION
      INSTALL_RPATH)
    get_target_property(value ${target} ${name})
    if(NOT value MATCHES "NOTFOUND$")
      set_property(TARGET ${target}_packaged PROPERTY ${name} ${value})
    endif()
  endforeach()
  set_target_properties(${target}_packaged PROPERTIES OUTPUT_NAME ${target}
    LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib/packaged BUILD_WITH_INSTALL_RPATH ON
    CXX_LINKER_LAUNCHER "${CMAKE_COMMAND};-E;env;MOEC_ZIG=${MOEC_ZIG};${MOEC_LINK_PACKAGED}")
  set_property(TARGET ${target}_packaged APPEND PROPERTY LINK_DEPENDS ${MOEC_LINK_PACKAGED}
    ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/packaged.ld)
endfunction()

set(MOEC_LINK_PACKAGED ${PROJECT_SOURCE_DIR}/scripts/link_packaged.sh)
moec_add_packaged(moec)
if(MOEC_CUDA)
  moec_add_packaged(moec_cuda)
endif()
