# SPDX-License-Identifier: Apache-2.0
# The oracle's own tests.
target_sources(moec_test_support PRIVATE
  golden/golden_case.cpp golden/layouts.cpp)
add_moec_test(oracle/oracle_test SUPPORT cases SOURCES
  oracle/examples_test.cpp oracle/gradients_test.cpp oracle/primitives_test.cpp)
