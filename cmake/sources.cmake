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
