# SPDX-License-Identifier: Apache-2.0
moec_add_sources(
  thread_pool.cpp)
