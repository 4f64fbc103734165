// SPDX-License-Identifier: Apache-2.0
// What the auxiliary losses share: which tokens count, and how they are cut into pieces.
#pragma once

#include "backend/args.h"
#include "backend/cpu/ops.h"

namespace moec::cpu {

inline constexpr int64_t kLossTokens = 16;  // least number of tokens per parallel piece

inline bool is_counted(const LossArgs& args, int64_t t) {
  return !args.token_mask || args.token_mask[t];
}
int64_t counted_tokens(const LossArgs& args, int64_t first, int64_t last);

// z_loss.cpp
double z_loss(const Device& device, const LossArgs& args);
void z_loss_backward(const Device& device, const LossArgs& args, double d_loss);

}  // namespace moec::cpu
