# SPDX-License-Identifier: Apache-2.0
# Growth of sized structs: the library once more as a later release would be, an application of each
# release, and all four pairs of them.
set(grown ${PROJECT_BINARY_DIR}/grown)
add_custom_command(OUTPUT ${grown}/include/moec/moec.h
  COMMAND ${MOEC_PYTHON} ${CMAKE_CURRENT_LIST_DIR}/grow_header.py
    ${PROJECT_SOURCE_DIR}/capi/include/moec/moec.h ${grown}/include/moec/moec.h
  DEPENDS ${CMAKE_CURRENT_LIST_DIR}/grow_header.py ${PROJECT_SOURCE_DIR}/capi/include/moec/moec.h
  VERBATIM)
add_custom_target(grown_header DEPENDS ${grown}/include/moec/moec.h)

# What the CPU computes with is compiled once: it sees structs that grow behind pointers alone, but
# for cpu_backend.cpp, whose thread pool holds one.
set(cpu src/backend/cpu)
get_target_property(sources moec_objects SOURCES)
list(FILTER sources EXCLUDE REGEX "/${cpu}/")
set(objects $<FILTER:$<TARGET_OBJECTS:moec_objects>,INCLUDE,/${cpu}/>)
add_library(moec_grown SHARED ${sources} ${PROJECT_SOURCE_DIR}/${cpu}/cpu_backend.cpp
  $<FILTER:${objects},EXCLUDE,/cpu_backend[.]cpp>)
add_dependencies(moec_grown grown_header)
target_include_directories(moec_grown PRIVATE
  ${grown}/include ${PROJECT_SOURCE_DIR}/src ${PROJECT_BINARY_DIR}/generated)
moec_compile_rooms_together(moec_grown)
target_compile_options(moec_grown PRIVATE -O0)  # it runs for milliseconds
target_precompile_headers(moec_grown PRIVATE ${PROJECT_SOURCE_DIR}/src/core/precompiled.h)
target_link_libraries(moec_grown PRIVATE moec_options Threads::Threads ${CMAKE_DL_LIBS})
target_link_options(moec_grown PRIVATE LINKER:--version-script=${PROJECT_SOURCE_DIR}/capi/moec.map)
set_target_properties(moec_grown PROPERTIES OUTPUT_NAME moec LIBRARY_OUTPUT_DIRECTORY ${grown}/lib
  VERSION ${PROJECT_VERSION} SOVERSION ${MOEC_ABI})

add_executable(growth_app capi/growth_app.c)
target_link_libraries(growth_app PRIVATE moec moec_options)
add_executable(growth_app_grown capi/growth_app.c)
target_include_directories(growth_app_grown BEFORE PRIVATE ${grown}/include)
target_link_libraries(growth_app_grown PRIVATE moec moec_options)
add_dependencies(growth_app_grown grown_header)

function(add_growth_test app library folder)
  add_test(NAME capi/${app}_${library} COMMAND ${app} ${library})
  set_tests_properties(capi/${app}_${library} PROPERTIES LABELS capi
    ENVIRONMENT LD_LIBRARY_PATH=${folder})
endfunction()
add_growth_test(growth_app same ${PROJECT_BINARY_DIR}/lib)
add_growth_test(growth_app newer ${grown}/lib)
add_growth_test(growth_app_grown older ${PROJECT_BINARY_DIR}/lib)
add_growth_test(growth_app_grown same ${grown}/lib)
