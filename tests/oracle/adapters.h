// SPDX-License-Identifier: Apache-2.0
// Low-rank terms of the oracle: y += B t with t = scale * A x, and their gradients.
#pragma once

#include "moe_oracle.h"

namespace moec::oracle {

// The factors of one expert, [rank,in] and [out,rank], and where their gradients are added up.
struct ExpertFactors {
  size_t rank, in, out;
  double scale;
  const double *a, *b;
  double *d_a = nullptr, *d_b = nullptr;
  int adapter = 0;
};
struct ExpertAdapters {
  std::vector<ExpertFactors> gate, up, down;
  bool empty() const { return gate.empty() && up.empty() && down.empty(); }
};

// Each row of x [R,in] through the factor A, rounded as products read it; zeros where the row has
// another adapter. only: the adapter of each row, empty: all of them.
inline Vec narrow_rows(Rounding rounding, const ExpertFactors& f, const Ids& only, const Vec& x) {
  const size_t count = x.size() / f.in;
  Vec t(count * f.rank, 0.0);
  for (size_t r = 0; r < count; ++r)
    for (size_t j = 0; j < f.rank && (only.empty() || only[r] == f.adapter); ++j) {
      double sum = 0;
      for (size_t i = 0; i < f.in; ++i) sum += f.a[j * f.in + i] * x[r * f.in + i];
      t[r * f.rank + j] = round_to(rounding, f.scale * sum);
    }
  return t;
}

inline void add_terms(Rounding rounding, const std::vector<ExpertFactors>& all, const Ids& only,
                      const Vec& x, Vec* y) {
  for (const ExpertFactors& f : all) {
    const Vec t = narrow_rows(rounding, f, only, x);
    for (size_t r = 0; r < x.size() / f.in; ++r)
      for (size_t o = 0; o < f.out; ++o)
        for (size_t j = 0; j < f.rank; ++j)
          (*y)[r * f.out + o] += f.b[o * f.rank + j] * t[r * f.rank + j];
  }
}

// d_y [R,out] to d_x [R,in] and the gradients of the factors, each added to.
inline void add_terms_backward(Rounding rounding, const std::vector<ExpertFactors>& all,
                               const Ids& only, const Vec& x, const Vec& d_y, Vec* d_x) {
  for (const ExpertFactors& f : all) {
    const Vec t = narrow_rows(rounding, f, only, x);
    for (size_t r = 0; r < d_y.size() / f.out; ++r) {
      const double* d = &d_y[r * f.out];
      for (size_t j = 0; j < f.rank && (only.empty() || only[r] == f.adapter); ++j) {
        double u = 0;
        for (size_t o = 0; o < f.out; ++o) u += d[o] * f.b[o * f.rank + j];
        u = round_to(rounding, f.scale * u);
        for (size_t i = 0; i < f.in; ++i) (*d_x)[r * f.in + i] += u * f.a[j * f.in + i];
        for (size_t i = 0; i < f.in; ++i) f.d_a[j * f.in + i] += u * x[r * f.in + i];
        for (size_t o = 0; o < f.out; ++o) f.d_b[o * f.rank + j] += d[o] * t[r * f.rank + j];
      }
    }
  }
}

}  // namespace moec::oracle
