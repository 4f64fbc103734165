# SPDX-License-Identifier: Apache-2.0
add_moec_test(unit/gemm_test LABELS per_backend aarch64)
if(CMAKE_CROSSCOMPILING)  # a processor that does arithmetic in software has time for small ones
  set_property(TEST unit/gemm_test APPEND PROPERTY ENVIRONMENT
    GTEST_FILTER=*/bf16_odd:*one_value:*/f32_by_bf16:*/int8_bf16_interleaved)
endif()
add_moec_test(unit/wgrad_test LABELS per_backend ISAS portable old_cpu)  # walks all sets itself
add_moec_test(unit/codes_test LABELS per_backend ISAS portable old_cpu)  # walks all sets itself
add_moec_test(unit/thread_pool_test)
add_moec_test(unit/activation_test)
add_moec_test(unit/experts_forward_test LABELS per_backend asan)
add_moec_test(unit/experts_backward_test LABELS per_backend asan)
add_moec_test(unit/experts_describe_test)
add_library(experts_case OBJECT EXCLUDE_FROM_ALL unit/experts_case.cpp)
target_link_libraries(experts_case PRIVATE moec_static moec_test_options)
target_include_directories(experts_case PRIVATE ${PROJECT_SOURCE_DIR}/src
  ${PROJECT_BINARY_DIR}/generated)
use_test_headers(experts_case 3)
foreach(test experts_forward_test experts_backward_test experts_describe_test)
  target_link_libraries(${test} PRIVATE experts_case)
endforeach()
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
add_moec_test(unit/staging_test LABELS asan tsan)
add_moec_test(unit/ep_waits_test LABELS asan)
add_moec_test(unit/peers_test)
add_moec_test(unit/plan_routes_test LABELS asan)
add_moec_test(unit/combine_test)
# Host code of the CUDA backend that needs no CUDA.
set(sm90 ${PROJECT_SOURCE_DIR}/src/backend/cuda/sm90)
add_moec_test(unit/row_gemm_choice_test SOURCES ${sm90}/row_gemm_choice.cpp
  ${sm90}/row_gemm_problem.cpp ${sm90}/code_lines.cpp)
add_moec_test(unit/decoded_experts_test SOURCES ${sm90}/decoded_product.cpp
  ${sm90}/row_gemm_problem.cpp ${sm90}/code_lines.cpp
  ${PROJECT_SOURCE_DIR}/src/backend/cuda/weights/decoded_experts.cpp)
add_moec_test(unit/few_scales_test)
add_moec_test(unit/line_words_test)
