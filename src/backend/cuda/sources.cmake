# SPDX-License-Identifier: Apache-2.0
# Sources of the plug-in by the architectures they are compiled for.
set(MOEC_CUDA_ARCH_sm90 90a-real)
set(MOEC_CUDA_ARCH_portable 80-real 90)  # 90: SASS and PTX
set(MOEC_CUDA_ARCH_exact 80-real 90)     # portable, with every fused multiply-add spelled out
set(MOEC_CUDA_FLAGS_exact -fmad=false)
set(MOEC_CUDA_ARCH_host OFF)

set(MOEC_CUDA_SOURCES_sm90
  row_gemm_up.cu row_gemm_up_pairs.cu row_gemm_down.cu row_gemm_grad_down.cu weight_grad.cu
  work_counters.cu
  small_up.cu small_down.cu one_token.cu)
set(MOEC_CUDA_SOURCES_portable plan.cu plan_few.cu plan_groups.cu plan_choice.cu plan_source.cu
  combine.cu pointer_table.cu portable_mma.cu portable_plain.cu)
set(MOEC_CUDA_SOURCES_exact
  route_forward.cu route_backward.cu gate_forward.cu gate_backward.cu column_sum.cu dense.cu
  loss.cu permute.cu
  portable_combine.cu portable_mix.cu portable_rows.cu portable_sums.cu)
set(MOEC_CUDA_SOURCES_host
  plugin.cpp cuda_backend.cpp cublaslt.cpp row_gemm.cpp tensor_map.cpp
  experts.cpp experts_fast.cpp experts_memory.cpp experts_portable.cpp
  experts_portable_backward.cpp experts_small.cpp experts_sums.cpp fast_products.cpp fast_shared.cpp
  portable_gemm.cpp small_gemm.cpp)
