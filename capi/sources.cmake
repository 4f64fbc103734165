# SPDX-License-Identifier: Apache-2.0
# The C boundary.
moec_add_sources(
  adapters.cpp
  boundary.cpp
  buffer.cpp
  context.cpp
  ep.cpp
  experts.cpp
  layer.cpp
  library.cpp
  losses.cpp
  plan.cpp
  quantise.cpp
  router.cpp
  rows.cpp
  tensor.cpp
  weights.cpp)
