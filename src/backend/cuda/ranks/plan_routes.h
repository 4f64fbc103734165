// SPDX-License-Identifier: Apache-2.0
// Routes of an ep, with the bits of the CPU.
#pragma once

#include "backend/cuda/device/op.h"
#include "backend/plan_routes.h"

namespace moec::cuda {

void plan_routes(const Op& op, const PlanRoutes& routes);

}  // namespace moec::cuda
