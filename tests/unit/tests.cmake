# SPDX-License-Identifier: Apache-2.0
add_moec_test(unit/gemm_test LABELS per_backend aarch64)
if(CMAKE_CROSSCOMPILING)  # a processor that does arithmetic in software has time for small ones
  set_property(TEST unit/gemm_test APPEND PROPERTY ENVIRONMENT
    GTEST_FILTER=*/bf16_odd:*one_value:*/f32_by_bf16:*/int8_bf16_interleaved)
endif()
add_moec_test(unit/wgrad_test LABELS per_backend ISAS portable old_cpu)  # walks all sets itself
add_moec_test(unit/codes_test LABELS per_backend ISAS portable old_cpu)  # walks all sets itself
add_moec_test(unit/pair_lines_test LABELS per_backend)  # likewise
add_moec_test(unit/thread_pool_test)
add_moec_test(unit/activation_test)
add_library(moec_experts_support STATIC EXCLUDE_FROM_ALL unit/experts_case.cpp)
target_link_libraries(moec_experts_support PUBLIC moec_test_support)
target_include_directories(moec_experts_support PRIVATE ${PROJECT_SOURCE_DIR}/src
  ${PROJECT_BINARY_DIR}/generated)
use_test_headers(moec_experts_support 3)
add_moec_test(unit/experts_forward_test SUPPORT experts LABELS per_backend asan)
add_moec_test(unit/experts_backward_test SUPPORT experts LABELS per_backend asan)
add_moec_test(unit/experts_describe_test SUPPORT experts)
add_moec_test(unit/coded_packing_test LABELS asan)
add_moec_test(unit/format_test)
add_moec_test(unit/math_test)
add_moec_test(unit/score_test)
add_moec_test(unit/router_test LABELS per_backend)
add_moec_test(unit/router_values_test LABELS per_backend)
add_moec_test(unit/gate_test LABELS per_backend)
add_moec_test(unit/plan_test LABELS per_backend)
add_moec_test(unit/permute_test LABELS per_backend)
add_moec_test(unit/loss_test LABELS per_backend)
add_moec_test(unit/progress_test)
add_moec_test(unit/rank_steps_test)
add_moec_test(unit/staging_test SANITIZED LABELS asan tsan)
add_moec_test(unit/ep_waits_test LABELS asan)
add_moec_test(unit/peers_test)
add_moec_test(unit/plan_routes_test LABELS asan)
add_moec_test(unit/combine_test)
# Host code of the CUDA backend that needs no CUDA.
set(sm90 ${PROJECT_SOURCE_DIR}/src/backend/cuda/sm90)
add_moec_test(unit/row_gemm_choice_test SOURCES ${sm90}/row_gemm_choice.cpp
  ${sm90}/row_gemm_problem.cpp ${sm90}/code_lines.cpp)
add_moec_test(unit/wide_choice_test SOURCES ${sm90}/row_gemm_choice.cpp
  ${sm90}/row_gemm_problem.cpp ${sm90}/code_lines.cpp)
add_moec_test(unit/decoded_experts_test SOURCES ${sm90}/decoded_product.cpp
  ${sm90}/row_gemm_problem.cpp ${sm90}/code_lines.cpp
  ${PROJECT_SOURCE_DIR}/src/backend/cuda/weights/decoded_experts.cpp)
add_moec_test(unit/few_scales_test)
add_moec_test(unit/line_words_test)
