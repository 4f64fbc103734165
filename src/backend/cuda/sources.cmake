# SPDX-License-Identifier: Apache-2.0
# Sources of the plug-in by the architectures they are compiled for.
set(MOEC_CUDA_ARCH_sm90 90a-real)
set(MOEC_CUDA_ARCH_portable 80-real 90)  # 90: SASS and PTX
set(MOEC_CUDA_ARCH_exact 80-real 90)     # portable, with every fused multiply-add spelled out
set(MOEC_CUDA_FLAGS_exact -fmad=false)
# Called where weights are made, by losses, where rows are permuted for others, and where an ep
# plans its routes, not in a layer's steps: the driver compiles them once on other GPUs than
# Hopper's, so that the plug-in has an image less of them.
set(MOEC_CUDA_ARCH_setup 80-virtual 90-real)
set(MOEC_CUDA_FLAGS_setup -fmad=false)
set(MOEC_CUDA_ARCH_host OFF)

set(MOEC_CUDA_SOURCES_sm90
  sm90/row_gemm_up.cu sm90/row_gemm_up_alternating.cu sm90/row_gemm_down.cu
  sm90/row_gemm_grad_down.cu sm90/row_gemm_coded_up.cu sm90/row_gemm_coded_up_alternating.cu
  sm90/row_gemm_coded_down.cu sm90/row_gemm_coded_grad_down.cu
  sm90/row_gemm_few_up.cu sm90/row_gemm_few_down.cu
  sm90/row_gemm_few_up_powers.cu sm90/row_gemm_few_down_powers.cu
  sm90/row_gemm_wide_up.cu sm90/row_gemm_wide_down.cu
  sm90/row_gemm_wide_up_powers.cu sm90/row_gemm_wide_down_powers.cu
  sm90/row_gemm_wide_grad.cu
  sm90/weight_grad.cu sm90/work_counters.cu sm90/narrow_rows.cu sm90/factor_grad.cu
  sm90/decode_lines.cu sm90/ordered_rows.cu sm90/gradient_rows.cu
  few_tokens/small_up.cu few_tokens/small_down.cu few_tokens/one_token.cu)
set(MOEC_CUDA_SOURCES_portable
  plan/plan.cu plan/plan_few.cu plan/plan_groups.cu plan/plan_choice.cu plan/plan_source.cu
  rows/combine.cu device/pointer_table.cu sm80/mma.cu sm80/mma_coded.cu sm80/few_rows.cu
  sm80/few_lines.cu sm80/one_token_codes.cu sm80/plain.cu weights/decode_experts.cu
  weights/decode_columns.cu)
set(MOEC_CUDA_SOURCES_exact
  routing/route_forward.cu routing/route_backward.cu routing/gate_forward.cu
  routing/gate_backward.cu routing/column_sum.cu routing/dense.cu
  rows/combine_general.cu rows/shared_mix.cu rows/row_ops.cu rows/token_sums.cu
  ranks/rank_steps.cu peers/peer_steps.cu weights/factors.cu)
set(MOEC_CUDA_SOURCES_setup
  weights/quantise.cu sm80/weight_values.cu routing/loss.cu routing/z_loss.cu
  rows/permute.cu ranks/plan_routes.cu)
set(MOEC_CUDA_SOURCES_host
  plugin.cpp cuda_backend.cpp peers/peers.cpp routing/cublaslt.cpp
  experts/cuda_path.cpp experts/row_steps.cpp weights/decoded_experts.cpp
  sm90/gate_form.cpp sm90/launch_list.cpp sm90/launch_adapters.cpp
  sm90/launch_weight_grads.cpp sm90/launch_decoded.cpp sm90/decoded_product.cpp sm90/row_gemm.cpp
  sm90/row_gemm_choice.cpp sm90/row_gemm_problem.cpp sm90/code_lines.cpp sm90/sm90_path.cpp
  sm90/tensor_map.cpp
  sm80/portable_path.cpp sm80/few_rows_path.cpp sm80/row_product.cpp sm80/few_rows.cpp
  sm80/decoded_rows.cpp sm80/one_token_codes.cpp
  few_tokens/few_tokens_path.cpp few_tokens/small_gemm.cpp)

# Files that are one compilation: most of the time of a small one is that of its headers, and what
# is alike in the kernels of two compilations is stored twice. Two files cannot have one name in
# their anonymous namespaces: the compiler says "has already been defined". Kernels of few rows of
# powers stay alone, and weight_grad.cu: beside others nvcc makes other code of them or of those.
# scripts/test_cuda_aarch64.sh compiles work_counters.cu and pointer_table.cu alone. CMake before
# 3.31 compiles each alone.
function(moec_cuda_together group)
  list(TRANSFORM ARGN PREPEND ${PROJECT_SOURCE_DIR}/src/backend/cuda/)
  set_source_files_properties(${ARGN} PROPERTIES UNITY_GROUP ${group})
endfunction()
moec_cuda_together(routing routing/route_forward.cu routing/route_backward.cu
  routing/gate_forward.cu routing/gate_backward.cu routing/column_sum.cu routing/dense.cu
  rows/combine_general.cu rows/shared_mix.cu rows/row_ops.cu rows/token_sums.cu
  weights/factors.cu)
moec_cuda_together(ranks ranks/rank_steps.cu peers/peer_steps.cu)
moec_cuda_together(plan plan/plan.cu plan/plan_few.cu plan/plan_groups.cu plan/plan_choice.cu
  plan/plan_source.cu)
moec_cuda_together(sm80 sm80/mma.cu sm80/mma_coded.cu sm80/few_rows.cu sm80/plain.cu
  weights/decode_columns.cu)
moec_cuda_together(setup weights/quantise.cu sm80/weight_values.cu routing/loss.cu
  routing/z_loss.cu rows/permute.cu ranks/plan_routes.cu)
moec_cuda_together(few_tokens few_tokens/small_up.cu few_tokens/small_down.cu
  few_tokens/one_token.cu)
moec_cuda_together(narrow sm90/narrow_rows.cu sm90/factor_grad.cu)
moec_cuda_together(row_gemm sm90/row_gemm_up.cu sm90/row_gemm_up_alternating.cu
  sm90/row_gemm_down.cu sm90/row_gemm_grad_down.cu)
moec_cuda_together(row_gemm_coded sm90/row_gemm_coded_up.cu
  sm90/row_gemm_coded_up_alternating.cu sm90/row_gemm_coded_down.cu
  sm90/row_gemm_coded_grad_down.cu)
moec_cuda_together(gradients sm90/row_gemm_wide_grad.cu sm90/gradient_rows.cu)
moec_cuda_together(row_gemm_few sm90/row_gemm_few_up.cu sm90/row_gemm_few_down.cu)
moec_cuda_together(weights weights/decode_experts.cu rows/combine.cu)
