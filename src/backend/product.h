// SPDX-License-Identifier: Apache-2.0
// Grouped products over the rows of experts, as every backend is asked for them.
//
//   row product       out_i(r, n) = sum over its terms of a(r, :) . b_e(n, :)
//   weight gradient   d_e(n, k) (+)= sum over the rows r of e of g(r, n) x(r, k)
//
// Row r is one of expert e. Sums are in fp32, in an order that depends on the shape alone.
#pragma once

#include "backend/args.h"

namespace moec {

// Rows of group e are [offsets[e], offsets[e] + counts[e]); other rows are padding, which is
// neither read nor written. No counts: up to the next offset. No offsets: one group of all rows.
struct RowGroups {
  int32_t count = 1;
  const int32_t *offsets = nullptr, *counts = nullptr;  // in the device's memory
  int64_t max_rows = 0;                                 // bound on the rows with padding
  int64_t choice_rows = 0;                              // kernels are chosen as for so many
};

struct RowOperand {  // element (r, k) at data + r * stride + k (elements)
  Array data;
  int64_t stride = 0;
  const int32_t* gather = nullptr;  // read row gather[r] instead; negative: zeros
};

// One product that is added to an output. `transposed`: b is [k,n], the gradient of the input.
struct ProductTerm {
  RowOperand a;
  const ExpertMatrix* b = nullptr;
  int64_t k = 0;
  bool transposed = false;
  int output = 0;
};

// Terms of one output stand in the order in which they are added; neighbours that read the same
// operand share its loads.
struct RowProduct {
  static constexpr int kMostTerms = 4;
  RowGroups groups;
  int64_t n = 0;  // columns of each output
  int outputs = 1, num_terms = 0;
  ProductTerm terms[kMostTerms];

  void add(const ProductTerm& term) { terms[num_terms++] = term; }
};

}  // namespace moec
