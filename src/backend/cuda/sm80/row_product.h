// SPDX-License-Identifier: Apache-2.0
// Grouped products for every GPU from sm_80 on, any shape, layout and alignment:
//   row product       c[r][n] = sum over k of a[r][k] b_e(n, k)         r: rows of expert e
//   weight gradient   d_e(n, k) (+)= sum over rows r of e of g[r][n] x[r][k]
// The matrices of a row product may be coded, in any listed format: their elements are decoded on
// the way to shared memory.
// 16-bit elements (or codes of them) that lie aligned go through the tensor cores (mma.cu),
// everything else through tiles of fp32 (plain.cu). Sums are in fp32, their order is a function of
// the shape alone.
#pragma once

#include "backend/cuda/device/rows.h"

namespace moec::cuda {

struct RowProduct {
  RowGroups groups;
  int64_t n = 0, k = 0;
  int parts = 1;             // matrices
  bool sum = false;          // parts are added up: part p reads a.data + p * k. Else side by side:
  RowOperand a;              // part p writes c.data + p * n
  const DeviceMatrix* b[2];  // [n,k] each
  bool transposed = false;   // ... or [k,n]
  bool biased = false;       // c += bias of b times bias_weight[r] (null = 1)
  const float* bias_weight = nullptr;
  Array c;  // not transposed and any stride
  int64_t c_stride = 0;
};
void row_product(const Op& op, const RowProduct& product);

struct WeightProduct {
  RowGroups groups;
  int64_t n = 0, k = 0;
  RowOperand g, x;
  const DeviceMatrix* d;    // [n,k]
  bool accumulate = false;  // a group without rows: unchanged, else zero
};
void weight_product(const Op& op, const WeightProduct& product);

}  // namespace moec::cuda
