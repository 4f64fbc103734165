# SPDX-License-Identifier: Apache-2.0
moec_add_sources(
  backward.cpp
  check.cpp
  context.cpp
  experts.cpp
  forward.cpp
  layer.cpp
  losses.cpp
  packed_file.cpp
  plan.cpp
  plan_file.cpp
  plan_layout.cpp
  router.cpp
  rows.cpp
  scratch.cpp
  weights.cpp
  weights_view.cpp)
