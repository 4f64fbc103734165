# SPDX-License-Identifier: Apache-2.0
# A program, no test: what it prints is compared, by diff, with what it prints for another library
# (LD_LIBRARY_PATH) or on another path.
add_executable(moec_bits bits/moec_bits.cpp bits/routers.cpp bits/plans.cpp bits/experts_case.cpp
  bits/experts.cpp bits/layers.cpp support/device.cpp)
target_include_directories(moec_bits PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(moec_bits PRIVATE moec moec_options Threads::Threads ${CMAKE_DL_LIBS})
set_target_properties(moec_bits PROPERTIES BUILD_RPATH_USE_ORIGIN ON)
target_link_options(moec_bits PRIVATE LINKER:--enable-new-dtags)
