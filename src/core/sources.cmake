# SPDX-License-Identifier: Apache-2.0
moec_add_sources(
  log.cpp
  thread_pool.cpp)
