// SPDX-License-Identifier: Apache-2.0
// Routers. Ids, weights, scores and gradients have the bits of the CPU backend.
#pragma once

#include "backend/cuda/device/op.h"

namespace moec::cuda {

// What route_forward and route_backward acquire: base, and bytes per token.
moec_size route_scratch(const moec_router_desc& desc);
// The part of it that sums the gradient of the ids' scales.
uint64_t scale_gradient_bytes(int64_t columns);
void route_forward(const Op& op, const RouteArgs& args);
void route_backward(const Op& op, const RouteGradArgs& args);
void bias_update(const Op& op, const BiasUpdateArgs& args);

}  // namespace moec::cuda
