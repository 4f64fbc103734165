// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "backend/plan_routes.h"

namespace moec::cpu {

void plan_routes(const PlanRoutes& routes);

}  // namespace moec::cpu
