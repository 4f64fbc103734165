# SPDX-License-Identifier: Apache-2.0
moec_add_sources(
  block_product.cpp coded_lines.cpp coded_product.cpp cpu_backend.cpp grouped_gemm.cpp
  grouped_wgrad.cpp isa.cpp pack.cpp packed_form.cpp row_math.cpp)
moec_add_sources(  # experts
  adapters.cpp combine.cpp dots.cpp expert_weights.cpp experts_describe.cpp experts_path.cpp
  mlp_backward.cpp mlp_forward.cpp shared_gate.cpp weight_values.cpp)
moec_add_sources(  # routing, plans, rows, losses
  gate.cpp loss.cpp permute.cpp plan.cpp plan_choice.cpp route_backward.cpp route_forward.cpp
  z_loss.cpp)
moec_add_sources(peers.cpp plan_routes.cpp quantise.cpp rank_steps.cpp)
# With other files gcc 12 sees a null pointer where there is none.
set_property(SOURCE ${CMAKE_CURRENT_LIST_DIR}/isa.cpp PROPERTY SKIP_UNITY_BUILD_INCLUSION ON)

# Instruction sets of the processor: name -> flags. From the plainest to the richest, and after
# everything else: where two objects hold the same inline function the linker keeps the first.
set(MOEC_ISA_portable "")
set(isas portable)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(MOEC_ISA_avx2 -mavx2 -mfma -mf16c)
  set(MOEC_ISA_avx512 ${MOEC_ISA_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq)
  set(MOEC_ISA_avx512bf16 ${MOEC_ISA_avx512} -mavx512vbmi -mavx512bf16)
  set(MOEC_ISA_amx ${MOEC_ISA_avx512bf16} -mamx-tile -mamx-bf16)
  # A sanitizer sees what runs, and takes most of the time to compile a tile. Of what does not run
  # the objects of another build serve as well. Tests of threads run with the richest set alone.
  if(MOEC_SANITIZE AND EXISTS /proc/cpuinfo)
    set(feature_portable fpu)
    set(feature_avx2 avx2)
    set(feature_avx512 avx512vl)
    set(feature_avx512bf16 avx512_bf16)
    set(feature_amx amx_bf16)
    set(richer FALSE)
    foreach(isa IN ITEMS amx avx512bf16 avx512 avx2 portable)
      file(STRINGS /proc/cpuinfo found REGEX "^flags.* ${feature_${isa}}( |$)" LIMIT_COUNT 1)
      if(richer AND MOEC_SANITIZE STREQUAL thread)
        set(found "")
      endif()
      if(NOT found AND MOEC_TILES)
        list(PREPEND MOEC_TILE_OBJECTS
          ${MOEC_TILES}/CMakeFiles/moec_objects.dir/src/backend/cpu/tile_${isa}.cpp.o)
        list(APPEND built_isas ${isa})
      elseif(NOT found)
        list(APPEND MOEC_ISA_${isa} -fno-sanitize=all)
      else()
        set(richer TRUE)
        # Marking where each of a tile's many scopes ends takes a fifth of the time to compile it.
        list(APPEND MOEC_ISA_${isa} -fno-sanitize-address-use-after-scope)
      endif()
    endforeach()
  endif()
  list(APPEND isas avx2 avx512 avx512bf16 amx)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  # Every such processor has neon. Scheduled before registers are given, gcc 12 spills sums.
  set(MOEC_ISA_neon $<$<CXX_COMPILER_ID:GNU>:-fno-schedule-insns>)
  set(MOEC_ISA_neonbf16 ${MOEC_ISA_neon} -march=armv8.2-a+bf16)
  list(APPEND isas neon neonbf16)
endif()
foreach(isa IN LISTS isas)
  if(NOT isa IN_LIST built_isas)
    moec_add_isa_sources(${isa} tile_${isa}.cpp)
  endif()
endforeach()
set(MOEC_ISAS ${isas})
