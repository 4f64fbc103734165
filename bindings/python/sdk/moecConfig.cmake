# SPDX-License-Identifier: Apache-2.0
# Target moec::moec, the shared library that a Python package carries. Component cuda: the plug-in
# is there, too.
get_filename_component(moec_lib ${CMAKE_CURRENT_LIST_DIR}/../.. ABSOLUTE)
if(NOT TARGET moec::moec)
  add_library(moec::moec SHARED IMPORTED)
  set_target_properties(moec::moec PROPERTIES IMPORTED_LOCATION ${moec_lib}/libmoec.so.0
    IMPORTED_SONAME libmoec.so.0 INTERFACE_INCLUDE_DIRECTORIES ${moec_lib}/../include)
endif()
set(moec_cuda_FOUND FALSE)
if(EXISTS ${moec_lib}/libmoec_cuda.so.0)
  set(moec_cuda_FOUND TRUE)
endif()
foreach(component IN LISTS moec_FIND_COMPONENTS)
  if(moec_FIND_REQUIRED_${component} AND NOT moec_${component}_FOUND)
    set(moec_FOUND FALSE)
    set(moec_NOT_FOUND_MESSAGE "the package has no component ${component}")
  endif()
endforeach()
unset(moec_lib)
