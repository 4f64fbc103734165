// SPDX-License-Identifier: Apache-2.0
// Grouped products for every GPU from sm_80 on, any shape, layout and alignment:
//   row product       c[r][n] = sum over k of a[r][k] b_e(n, k)         r: rows of expert e
//   weight gradient   d_e(n, k) (+)= sum over rows r of e of g[r][n] x[r][k]
// 16-bit elements that lie aligned go through the tensor cores (portable_mma.cu), everything else
// through tiles of fp32 (portable_plain.cu). Sums are in fp32, their order is a function of the
// shape alone.
#pragma once

#include "backend/cuda/op.h"

namespace moec::cuda {

// Rows of group e are [offsets[e], offsets[e] + counts[e]). No offsets: one group of all rows.
struct RowGroups {
  int count = 1;
  const int32_t *offsets = nullptr, *counts = nullptr;  // on the device
  int64_t max_rows = 0;                                 // bound on the rows with padding
};

struct RowOperand {  // element (r, k) at data + r * stride + k
  Array data;
  int64_t stride = 0;
  const int32_t* gather = nullptr;  // read row gather[r] instead
};

// An ExpertMatrix whose arrays of pointers lie on the device.
struct DeviceMatrix {
  ExpertMatrix view;
  bool aligned = false;  // every expert begins at 16 bytes
};

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
