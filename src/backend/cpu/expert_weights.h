// SPDX-License-Identifier: Apache-2.0
// The matrices and biases of a set of experts as the products want them, from where they are bound
// or from the packed copy.
//
//   packed copy   [coded matrices (packed_codes.h)]
//                 [experts][gate | up | down | gate bias | up bias | down bias]
//                 plain matrices in their forms (packed_form.h), biases in fp32 (zeros where there
//                 are none; of coded matrices only those that there are), each part padded to a
//                 cache line; without gate parts for a plain MLP
#pragma once

#include "backend/cpu/gemm.h"

namespace moec::cpu {

enum class Part { kGate, kUp, kDown };

const ExpertMatrix& matrix_of(const WeightsView& weights, Part part);
inline bool has_bias(const WeightsView& weights, Part part) {
  return matrix_of(weights, part).has_bias();
}

// transposed: the data gradient.
GemmWeight gemm_weight(const WeightsView& weights, Part part, bool transposed);

// Entries [first, first + count) of the bias of expert e, in fp32; zeros where there is none.
void load_bias(const WeightsView& weights, Part part, int64_t e, int64_t first, int64_t count,
               float* to);

}  // namespace moec::cpu
