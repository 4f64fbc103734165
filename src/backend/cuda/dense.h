// SPDX-License-Identifier: Apache-2.0
// One matrix product of any element types and strides, accumulated in fp32: the router's gate and
// its gradients.
#pragma once

#include "backend/cuda/op.h"

namespace moec::cuda {

struct Dense {  // c [m,n] = sum over k of a(m,k) b(k,n); all three extents are at least 1
  int64_t m, n, k;
  Array a, b;  // f32, bf16, f16
  int64_t a_row, a_col, b_row, b_col;
};

// A product is made in parts over k, a function of the extents only, which the reader adds up in
// their order: parts [dense_parts(), m, n].
int64_t dense_parts(const Dense& dense);
// Bytes of the parts, whatever k: at most the larger of [m,n] and kDenseBytes.
uint64_t dense_bytes(int64_t m, int64_t n);
inline constexpr uint64_t kDenseBytes = 4 << 20;
void dense_product(const Op& op, const Dense& dense, float* parts);

}  // namespace moec::cuda
