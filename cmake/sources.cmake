# SPDX-License-Identifier: Apache-2.0
# Sources are listed by name, in one sources.cmake per room, relative to that list.

function(moec_add_sources)
  list(TRANSFORM ARGN PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
  target_sources(moec_objects PRIVATE ${ARGN})
endfunction()

# moec_add_isa_sources(ISA files...): files compiled with the flags of MOEC_ISA_<ISA>. They may
# define no inline function that other files use too: the linker could keep the copy that an old
# CPU cannot run.
function(moec_add_isa_sources isa)
  if(NOT DEFINED MOEC_ISA_${isa})
    message(FATAL_ERROR "moec_add_isa_sources: no flags MOEC_ISA_${isa}; add them to the table")
  endif()
  moec_add_sources(${ARGN})
  list(TRANSFORM ARGN PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
  set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS ${MOEC_ISA_${isa}})
  set_property(SOURCE ${ARGN} PROPERTY SKIP_PRECOMPILE_HEADERS ON)  # compiled without these flags
endfunction()

# moec_compile_rooms_together(TARGET): the files of a room are one compilation, which takes a third
# of the time: most of that of each file is what it has in common with others. For what is not
# shipped. Two files of a room cannot have one name in their anonymous namespaces. Called where the
# target is made, since properties of sources belong to a folder.
function(moec_compile_rooms_together target)
  get_target_property(sources ${target} SOURCES)
  foreach(room IN ITEMS capi src/layer src/ep src/experts src/backend/cpu)
    set(files ${sources})
    list(FILTER files INCLUDE REGEX "^${PROJECT_SOURCE_DIR}/${room}/[^/]*[.]cpp$")
    string(MAKE_C_IDENTIFIER ${room} group)
    set_property(SOURCE ${files} PROPERTY UNITY_GROUP ${group})
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()
