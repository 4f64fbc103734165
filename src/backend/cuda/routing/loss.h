// SPDX-License-Identifier: Apache-2.0
// Auxiliary losses over the router's logits, with the bits of the CPU backend. Scratch is O(E).
#pragma once

#include "backend/cuda/device/op.h"

namespace moec::cuda {

inline constexpr int64_t kLossTokens = 16;  // least number of tokens of a chunk

void loss_forward(const Op& op, const LossArgs& args);
void loss_backward(const Op& op, const LossArgs& args);
void z_loss(const Op& op, const LossArgs& args, bool backward);  // z_loss.cu

}  // namespace moec::cuda
