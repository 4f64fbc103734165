# SPDX-License-Identifier: Apache-2.0
# The oracle's own tests.
target_sources(moec_test_support PRIVATE
  golden/golden_case.cpp golden/layouts.cpp
  cases/expert_cases.cpp cases/feature_cases.cpp cases/router_cases.cpp cases/selection_cases.cpp)
add_moec_test(oracle/oracle_test SOURCES
  oracle/examples_test.cpp oracle/gradients_test.cpp oracle/primitives_test.cpp)
