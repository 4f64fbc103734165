// SPDX-License-Identifier: Apache-2.0
// Sums over tokens made by chunk, as the CPU backend makes them: the same order, the same bits.
#pragma once

#include "backend/cuda/device/op.h"
#include "core/chunks.h"

namespace moec::cuda {

// d [width] (+)= sum over chunks of partial [chunks, width]
void store_sum(const Op& op, const float* partial, int64_t chunks, int64_t width, const Array& d,
               bool accumulate);

}  // namespace moec::cuda
