// SPDX-License-Identifier: Apache-2.0
// The weight gradients that make up the step FactorGrads.
#pragma once

#include "backend/program.h"
#include "core/dtype.h"

namespace moec {

// product(g, n, x, k, d, accumulate) for each, d [n,k] of every expert. An A of all experts gets
// those of each first; then add_experts(n, out) adds them up, in the order of experts.
template <class Product, class AddExperts>
void for_each_factor_grad(const FactorGrads& s, const Product& product,
                          const AddExperts& add_experts) {
  const moec_dtype dtype = s.mlp->dtype;
  int64_t first = 0;
  const auto narrow = [&](const void* rows) {
    auto* const from = static_cast<char*>(const_cast<void*>(rows)) + first * dtype_bytes(dtype);
    return RowOperand{{from, dtype}, s.rank, nullptr};
  };
  for (const Factors& f : *s.to) {
    if (f.a.present() && f.one_for_all) {
      ExpertMatrix each;
      each.values = {s.sums, nullptr, f.rank * s.in, 0, MOEC_F32};
      each.dtype = MOEC_F32;
      each.row_stride = s.in;
      each.col_stride = 1;
      product(narrow(s.d_narrow), f.rank, s.x, s.in, each, false);
      add_experts(f.rank, f.a.expert(0));
    } else if (f.a.present()) {
      product(narrow(s.d_narrow), f.rank, s.x, s.in, f.a, s.accumulate);
    }
    for (int i = 0; i < 2; ++i)
      if (f.b[i].present())
        product(s.d_out[i], s.out, narrow(s.narrow), f.rank, f.b[i], s.accumulate);
    first += f.rank;
  }
}

}  // namespace moec
