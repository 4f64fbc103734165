// SPDX-License-Identifier: Apache-2.0
// Codes and scales of weights, with the bytes of the CPU backend.
#pragma once

#include "backend/cuda/device/op.h"
#include "backend/quantise_args.h"

namespace moec::cuda {

void quantise(const Op& op, const QuantiseArgs& args);

}  // namespace moec::cuda
