# SPDX-License-Identifier: Apache-2.0
add_moec_test(unit/gemm_test LABELS per_backend)
add_moec_test(unit/wgrad_test LABELS per_backend)
add_moec_test(unit/thread_pool_test)
add_moec_test(unit/activation_test)
add_moec_test(unit/experts_forward_test SOURCES unit/experts_case.cpp LABELS per_backend)
add_moec_test(unit/experts_backward_test SOURCES unit/experts_case.cpp LABELS per_backend)
add_moec_test(unit/experts_describe_test SOURCES unit/experts_case.cpp)
