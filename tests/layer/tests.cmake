# SPDX-License-Identifier: Apache-2.0
# The whole layer through moec.h against the oracle. A machine without an instruction set skips it.
target_sources(moec_test_support PRIVATE
  support/adapter_set.cpp support/descriptors.cpp support/device.cpp support/golden_adapters.cpp
  support/layer_runner.cpp support/tensors.cpp support/weight_sets.cpp)
set(all_isas ${MOEC_ISAS})
add_moec_test(layer/golden_test LABELS per_backend aarch64 ISAS ${all_isas} old_cpu)
add_moec_test(layer/golden_formats_test LABELS per_backend ISAS ${all_isas})
add_moec_test(layer/features_test SUPPORT cases LABELS per_backend asan aarch64 ISAS ${all_isas})
add_moec_test(layer/sweep_test SUPPORT cases LABELS per_backend ISAS ${all_isas})
add_moec_test(layer/mixed_test SUPPORT cases quant LABELS per_backend asan ISAS ${all_isas})
add_moec_test(layer/mixed_plans_test LABELS per_backend asan)
add_moec_test(layer/mixed_routers_test LABELS per_backend asan ISAS ${all_isas})
add_moec_test(layer/types_test SUPPORT cases LABELS per_backend asan)
add_moec_test(layer/adapters_golden_test LABELS per_backend ISAS ${all_isas})
add_moec_test(layer/adapters_copy_test SUPPORT quant LABELS per_backend asan)
add_moec_test(layer/adapters_merge_test LABELS per_backend asan)
add_moec_test(layer/adapters_test SUPPORT cases LABELS per_backend asan ISAS ${all_isas})
add_moec_test(layer/experts_test SUPPORT cases LABELS per_backend asan aarch64)
add_moec_test(layer/formats_test SUPPORT cases quant LABELS per_backend asan ISAS ${all_isas}
  old_cpu)
# A processor in software has time for a few; the same objects run all cases as "portable".
set_property(TEST layer/formats_test@old_cpu APPEND PROPERTY ENVIRONMENT
  GTEST_FILTER=*/split:*/gate_then_up_in_out:*/interleaved_in_out_per_expert:*/plain_mlp:Fp8*)
add_moec_test(layer/schemes_test SUPPORT quant LABELS per_backend asan ISAS ${all_isas})
add_moec_test(layer/packed_test LABELS asan)
add_moec_test(layer/describe_test SUPPORT quant ISAS ${all_isas})
add_moec_test(layer/neighbours_test SUPPORT quant LABELS per_backend ISAS ${all_isas})
add_moec_test(layer/quantise_golden_test SUPPORT quant LABELS per_backend)
add_moec_test(layer/quantise_test SUPPORT quant LABELS per_backend asan)
if(NOT MOEC_SANITIZE)  # sanitizers bring their own malloc
  add_moec_test(layer/coded_memory_test SOURCES capi/counted_malloc.cpp SUPPORT quant
    LABELS per_backend)
endif()
add_moec_test(layer/values_test SUPPORT quant LABELS per_backend asan ISAS ${all_isas})
add_moec_test(layer/plans_test SUPPORT cases LABELS per_backend asan)
add_moec_test(layer/rules_test LABELS per_backend asan)
add_moec_test(layer/routing_test SUPPORT cases LABELS per_backend asan)
add_moec_test(layer/ep_test LABELS asan tsan)
if(MOEC_SANITIZE)  # 64 threads meet as 1,024 do, which take minutes
  set_property(TEST layer/ep_test APPEND PROPERTY ENVIRONMENT GTEST_FILTER=-*EpManyRanks*/1024)
endif()
# Layers of ranks, of threads, processes or GPUs.
add_library(moec_ep_support STATIC EXCLUDE_FROM_ALL support/ep_problem.cpp support/ep_runs.cpp
  support/ep_sequence.cpp support/ep_training.cpp)
target_link_libraries(moec_ep_support PUBLIC moec_ranks_support moec_quant_support)
use_test_headers(moec_ep_support 1)
compile_together(moec_ep_support)
add_moec_test(layer/ep_layer_test LABELS asan)
target_link_libraries(ep_layer_test PRIVATE moec_ep_support)
add_moec_test(layer/ep_losses_test LABELS asan tsan)
# The library is searched, whatever program calls it.
add_executable(short_bias layer/short_bias.c)
target_link_libraries(short_bias PRIVATE moec moec_options)
if(MOEC_SANITIZE MATCHES address)
  set(program $<TARGET_FILE:short_bias>)
  if(MOEC_PROGRAMS)
    set(program ${MOEC_PROGRAMS}/bin/short_bias)
  else()
    add_dependencies(tests_asan short_bias)
  endif()
  add_test(NAME layer/short_bias COMMAND ${program})
  set_tests_properties(layer/short_bias PROPERTIES LABELS "layer;asan"
    ENVIRONMENT "${find_sanitized}" PASS_REGULAR_EXPRESSION "heap-buffer-overflow")
endif()
