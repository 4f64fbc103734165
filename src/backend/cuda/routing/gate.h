// SPDX-License-Identifier: Apache-2.0
// The router's gate: logits = transform(x) * weight^T + bias, and its gradients.
#pragma once

#include "backend/cuda/device/op.h"

namespace moec::cuda {

// Most scratch of gate_forward and gate_backward: base, and bytes per token.
moec_size gate_scratch(const moec_router_desc& desc, int64_t hidden);
void gate_forward(const Op& op, const GateArgs& args);
void gate_backward(const Op& op, const GateGradArgs& args);

}  // namespace moec::cuda
