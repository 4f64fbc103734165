// SPDX-License-Identifier: Apache-2.0
// Grouped products for every GPU from sm_80 on, any shape, layout and alignment:
//   row product       c[r][n] = sum over k of a[r][k] b_e(n, k)         r: rows of expert e
//   weight gradient   d_e(n, k) (+)= sum over rows r of e of g[r][n] x[r][k]
// The matrices of a row product may be coded, in any listed format, or fp32 that is rounded to 16
// bits: their elements are made on the way to shared memory.
// 16-bit elements (or what they are made of) that lie aligned go through the tensor cores (mma.cu;
// few_lines.cu and few_rows.cu where experts have few rows of codes), everything else through tiles
// of fp32 (plain.cu). Sums are in fp32, their order is a function of the shape alone.
#pragma once

#include "backend/adapters.h"
#include "backend/cuda/device/rows.h"

namespace moec::cuda {

struct ProductOutput {  // output i of a row product at c + i * n, of any stride
  Array c;
  int64_t stride = 0;
  bool biased = false;                 // c += bias of the output's first matrix ...
  const float* bias_weight = nullptr;  // ... times bias_weight[r], null = 1
  bool accumulate = false;             // c += the product, rounded again to its type
  // Of narrow rows: c times the scale of each rank, zeros for other adapters than the token's.
  const LowRank* ranks = nullptr;
  const int32_t* row_token = nullptr;
  bool groups_made = false;  // the kernel in front has begun behind those that make row groups
};
// Matrices are as PointerTable::device() gives them. One term, or two of one length: of an output
// each with the same operand, or of one output with operands of the same stride.
void row_product(const Op& op, const RowProduct& product, const ProductOutput& output);
// What runs it.
struct ProductKernel {
  enum By { kFewRows, kMma, kPlain };
  By by;
  const char *name, *tile;  // rows, columns, depth
};
ProductKernel kernel_of(const RowProduct& product, const ProductOutput& output);

struct WeightProduct {
  RowGroups groups;
  int64_t n = 0, k = 0;
  RowOperand g, x;
  const ExpertMatrix* d;    // [n,k]
  bool accumulate = false;  // a group without rows: unchanged, else zero
};
void weight_product(const Op& op, const WeightProduct& product);
ProductKernel kernel_of(const WeightProduct& product);

}  // namespace moec::cuda
