# SPDX-License-Identifier: Apache-2.0
moec_add_sources(
  block_product.cpp cpu_backend.cpp grouped_gemm.cpp grouped_wgrad.cpp isa.cpp pack.cpp
  row_kernels.cpp)
moec_add_sources(  # routing, plans, rows, losses
  gate.cpp loss.cpp permute.cpp plan.cpp plan_choice.cpp route_backward.cpp route_forward.cpp)

# Instruction sets: name -> flags. Listed from the plainest to the richest, and after everything else:
# where two objects hold the same inline function the linker keeps the first.
set(MOEC_ISA_portable "")
set(MOEC_ISA_avx2 -mavx2 -mfma -mf16c)
set(MOEC_ISA_avx512 ${MOEC_ISA_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq)
set(MOEC_ISA_avx512bf16 ${MOEC_ISA_avx512} -mavx512bf16)
set(MOEC_ISA_amx ${MOEC_ISA_avx512bf16} -mamx-tile -mamx-bf16)

moec_add_isa_sources(portable tile_portable.cpp row_kernels_portable.cpp)
moec_add_isa_sources(avx2 tile_avx2.cpp row_kernels_avx2.cpp)
moec_add_isa_sources(avx512 tile_avx512.cpp row_kernels_avx512.cpp)
moec_add_isa_sources(avx512bf16 tile_avx512bf16.cpp)
moec_add_isa_sources(amx tile_amx.cpp)

# Loops over rows are left to the vectoriser: let it evaluate both sides of a choice.
set(loops row_kernels_portable.cpp row_kernels_avx2.cpp row_kernels_avx512.cpp)
list(TRANSFORM loops PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
set_property(SOURCE ${loops} APPEND PROPERTY COMPILE_OPTIONS -fno-trapping-math)
set_property(SOURCE ${CMAKE_CURRENT_LIST_DIR}/row_kernels_avx512.cpp
  APPEND PROPERTY COMPILE_OPTIONS -mprefer-vector-width=512)
