# SPDX-License-Identifier: Apache-2.0
moec_add_sources(
  coded_packing.cpp packed_codes.cpp packed_layout.cpp registry.cpp)
# With precompiled headers gcc 12 sees an access out of bounds where there is none.
set_property(SOURCE ${CMAKE_CURRENT_LIST_DIR}/registry.cpp PROPERTY SKIP_PRECOMPILE_HEADERS ON)
