// SPDX-License-Identifier: Apache-2.0
// Rows between token order and expert order: with the bits of the CPU backend.
#pragma once

#include "backend/cuda/device/op.h"

namespace moec::cuda {

void permute(const Op& op, const PermuteArgs& args);
void unpermute(const Op& op, const UnpermuteArgs& args);
void permute_backward(const Op& op, const PermuteGradArgs& args);
void unpermute_backward(const Op& op, const UnpermuteGradArgs& args);

}  // namespace moec::cuda
