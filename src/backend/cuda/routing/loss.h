// SPDX-License-Identifier: Apache-2.0
// Auxiliary losses over the router's logits, with the bits of the CPU backend. Scratch is O(E).
#pragma once

#include "backend/cuda/device/op.h"

namespace moec::cuda {

void loss_forward(const Op& op, const LossArgs& args);
void loss_backward(const Op& op, const LossArgs& args);

}  // namespace moec::cuda
