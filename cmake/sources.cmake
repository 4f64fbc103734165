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
  set_property(SOURCE ${ARGN} PROPERTY SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()

# moec_compile_together(TARGET): many sources of the library in one compilation, which takes half
# the time, for objects that nobody installs. Not those of MOEC_ALONE: each has a name in its
# anonymous namespace that another file has, too. Of one that is missing there the compiler says
# "redefinition".
set(MOEC_ALONE core/log.cpp core/thread_pool.cpp ep/peers.cpp layer/adapters_bind.cpp
  layer/experts.cpp layer/packed_file.cpp layer/plan_file.cpp layer/router.cpp backend/cpu/dots.cpp
  backend/cpu/experts_path.cpp backend/cpu/packed_codes.cpp backend/cpu/rank_steps.cpp)
list(TRANSFORM MOEC_ALONE PREPEND ${PROJECT_SOURCE_DIR}/src/)
function(moec_compile_together target)
  set_property(SOURCE ${MOEC_ALONE} PROPERTY SKIP_UNITY_BUILD_INCLUSION ON)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 10)
endfunction()
