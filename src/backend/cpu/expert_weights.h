// SPDX-License-Identifier: Apache-2.0
// The matrices and biases of a set of experts as the products want them, from where they are bound
// or from the packed copy.
#pragma once

#include "backend/cpu/gemm.h"
#include "backend/packed_layout.h"

namespace moec::cpu {

// transposed: the data gradient.
GemmWeight gemm_weight(const WeightsView& weights, Part part, bool transposed);

// Entries [first, first + count) of the bias of expert e, in fp32; zeros where there is none.
void load_bias(const WeightsView& weights, Part part, int64_t e, int64_t first, int64_t count,
               float* to);

}  // namespace moec::cpu
