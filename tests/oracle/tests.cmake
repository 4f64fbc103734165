# SPDX-License-Identifier: Apache-2.0
# The oracle's own tests. Optimised in every configuration, because the layer tests evaluate the
# oracle on wide matrices.
target_sources(moec_test_support PRIVATE
  golden/golden_case.cpp golden/layouts.cpp
  cases/expert_cases.cpp cases/feature_cases.cpp cases/router_cases.cpp cases/selection_cases.cpp)
target_compile_options(moec_test_support PRIVATE -O3)
add_moec_test(oracle/oracle_test SOURCES
  oracle/examples_test.cpp oracle/gradients_test.cpp oracle/primitives_test.cpp)
