// SPDX-License-Identifier: Apache-2.0
// One MLP of the oracle: what R rows compute in it, forward and backward.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "adapters.h"

// Functions of the oracle that take most of its time are compiled for wider vectors, too, where the
// processor has them. Nothing is fused (-ffp-contract=off), and the results have the same bits.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define MOEC_WIDER_VECTORS [[gnu::target_clones("default", "avx2")]]
#else
#define MOEC_WIDER_VECTORS
#endif

namespace moec::oracle {

// Eight partial sums: the only concession to speed.
inline double dot(const double* a, const double* b, size_t n) {
  double s[8] = {};
  size_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (size_t j = 0; j < 8; ++j) s[j] += a[i + j] * b[i + j];
  for (; i < n; ++i) s[0] += a[i] * b[i];
  return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}
inline void add_scaled(double* y, double a, const double* x, size_t n) {
  for (size_t i = 0; i < n; ++i) y[i] += a * x[i];
}
inline void add_squares(double* y, double a, const double* x, size_t n) {
  for (size_t i = 0; i < n; ++i) y[i] += (a * x[i]) * (a * x[i]);
}
inline double norm(const double* a, size_t n) {
  return std::sqrt(dot(a, a, n));
}
inline void take_roots(Vec* v) {
  for (double& value : *v) value = std::sqrt(value);
}
inline Vec column_norms(const double* matrix, size_t rows, size_t columns) {
  Vec norms(columns, 0.0);
  for (size_t r = 0; r < rows; ++r) add_squares(norms.data(), 1, matrix + r * columns, columns);
  take_roots(&norms);
  return norms;
}
inline const double* at(const Vec& v, size_t index) {
  return v.empty() ? nullptr : v.data() + index;
}
inline double* at(Vec& v, size_t index) {
  return v.empty() ? nullptr : v.data() + index;
}

// One MLP: the matrices of one expert, or their gradients.
template <typename Pointer>
struct Mlp {
  Pointer gate, up, down, gate_bias, up_bias, down_bias;
};
template <typename Pointer, typename Weights>
Mlp<Pointer> mlp_of(Weights& w, size_t e, size_t hidden, size_t inter) {
  return {at(w.gate, e * inter * hidden), at(w.up, e * inter * hidden),
          at(w.down, e * hidden * inter), at(w.gate_bias, e * inter),
          at(w.up_bias, e * inter),       at(w.down_bias, e * hidden)};
}

struct Shape {
  size_t hidden, inter;
  Activation act;
  Fault fault;
  Rounding operands = Rounding::kNone, between = Rounding::kNone;
  bool terms_apart = true, shifts = false;
};

// Everything R rows compute in one MLP. The activation of a row is multiplied by act_weight before
// the down projection, whose bias is multiplied by it, too. Loops go over one row of a matrix and
// then over all R rows: callers that have many pass kRowsAtOnce, which a core's cache holds when
// they are wide.
constexpr size_t kRowsAtOnce = 32;
struct MlpRows {
  Vec x, act_weight;  // [R,H], [R]
  Vec g, u, h, y;     // [R,I], [R,I], [R,I], [R,H]
  ExpertAdapters adapters;
  Ids adapter;  // of each row, the only one; empty: all
  size_t count() const { return act_weight.size(); }
};
// What the products with the down projection read of h [R,I].
inline Vec weighted_acts(const Shape& s, const MlpRows& rows) {
  Vec acts = rows.h;
  for (size_t i = 0; i < acts.size(); ++i)
    acts[i] = round_to(s.operands, rows.act_weight[i / s.inter] * acts[i]);
  return acts;
}
// Of what the terms of adapters are added to, where that is a result of its own.
inline Rounding without_terms(const Shape& s, const ExpertAdapters& adapters) {
  return adapters.empty() || !s.terms_apart ? Rounding::kNone : s.between;
}
MOEC_WIDER_VECTORS inline void mlp_forward(const Shape& s, const Mlp<const double*>& m,
                                           MlpRows* rows) {
  const size_t count = rows->count();
  rows->g.assign(count * s.inter, 0.0);
  rows->u.assign(count * s.inter, 0.0);
  rows->h.assign(count * s.inter, 0.0);
  rows->y.assign(count * s.hidden, 0.0);
  Vec gate_terms(count * s.inter, 0.0), up_terms(count * s.inter, 0.0);
  add_terms(s.operands, rows->adapters.gate, rows->adapter, rows->x, &gate_terms);
  add_terms(s.operands, rows->adapters.up, rows->adapter, rows->x, &up_terms);
  const Rounding bare = without_terms(s, rows->adapters);
  for (size_t i = 0; i < s.inter; ++i) {
    for (size_t r = 0; r < count; ++r) {
      const double* x = &rows->x[r * s.hidden];
      double& g = rows->g[r * s.inter + i];
      double& u = rows->u[r * s.inter + i];
      if (m.gate) g = dot(m.gate + i * s.hidden, x, s.hidden);
      if (m.gate_bias) g += m.gate_bias[i];
      u = dot(m.up + i * s.hidden, x, s.hidden);
      if (m.up_bias) u += m.up_bias[i];
      g = round_to(s.act.steps, round_to(bare, g) + gate_terms[r * s.inter + i]);
      u = round_to(s.act.steps, round_to(bare, u) + up_terms[r * s.inter + i]);
      rows->h[r * s.inter + i] = activate(s.act, g, u, s.fault);
    }
  }
  const Vec acts = weighted_acts(s, *rows);
  for (size_t o = 0; o < s.hidden; ++o) {
    for (size_t r = 0; r < count; ++r) {
      const double weight = rows->act_weight[r];
      double& y = rows->y[r * s.hidden + o];
      y = dot(m.down + o * s.inter, &acts[r * s.inter], s.inter);
      if (m.down_bias) y += (s.fault == Fault::kDownBiasUnweighted ? 1 : weight) * m.down_bias[o];
    }
  }
  add_terms(s.operands, rows->adapters.down, rows->adapter, acts, &rows->y);
}

// What a dot product a.b in fp32 may be off by: an ulp of |a| |b|. Its n terms are independent: a
// partial sum has a size of about |a| |b| / sqrt(n), and n roundings add up to sqrt(n) times one.
constexpr double kFp32Ulp = 0x1p-23;

// Gradients at (gate, up) for a unit gradient of the result.
struct Slopes {
  double gate = 0, up = 0;
};
inline Slopes slopes_at(const Shape& s, double gate, double up) {
  Slopes found;
  activate_backward(s.act, gate, up, &found.gate, &found.up, s.fault);
  return found;
}
// How far they are from there at most where gate and up are off by d_gate and d_up.
inline Slopes slope_shifts(const Shape& s, double gate, double up, double d_gate, double d_up) {
  const Slopes here = slopes_at(s, gate, up);
  Slopes most;
  for (const double g : {gate - d_gate, gate + d_gate})
    for (const double u : {up - d_up, up + d_up}) {
      const Slopes there = slopes_at(s, g, u);
      most.gate = std::max(most.gate, std::abs(there.gate - here.gate));
      most.up = std::max(most.up, std::abs(there.up - here.up));
    }
  return most;
}

// What mlp_backward adds to: gradients, the squares of the terms that they are sums of, and the
// squares of what those terms may be off by.
struct MlpSums {
  Mlp<double*> d, squares, shifts;
  void add(double* Mlp<double*>::* matrix, size_t at, double a, const double* x, size_t n,
           double shift = 0) const {
    if (!(d.*matrix)) return;
    double* const sum = d.*matrix + at;
    double* const square = squares.*matrix + at;
    double* const shifted = shift > 0 ? shifts.*matrix + at : nullptr;
    for (size_t i = 0; i < n; ++i) {
      sum[i] += a * x[i];
      square[i] += (a * x[i]) * (a * x[i]);
      if (shift > 0) shifted[i] += (shift * x[i]) * (shift * x[i]);
    }
  }
};
// The gradients at the act_weight of each row [R], likewise.
struct WeightSums {
  Vec d, squares;
  void add(size_t r, double term) {
    d[r] += term;
    squares[r] += term * term;
  }
};

// d_y [R,H]. Adds the weights' gradients; d_x [R,H] and d_weight are written.
MOEC_WIDER_VECTORS inline void mlp_backward(const Shape& s, const Mlp<const double*>& m,
                                            const MlpRows& rows, const Vec& d_y,
                                            const MlpSums& sums, Vec* d_x, WeightSums* d_weight) {
  using Matrices = Mlp<double*>;
  constexpr double kOne = 1;
  const size_t count = rows.count();
  const Vec acts = weighted_acts(s, rows);
  Vec d_hw(count * s.inter, 0.0);  // at act_weight * h
  d_x->assign(count * s.hidden, 0.0);
  d_weight->d.assign(count, 0.0);
  d_weight->squares.assign(count, 0.0);
  for (size_t o = 0; o < s.hidden; ++o) {
    for (size_t r = 0; r < count; ++r) {
      const double d_out = d_y[r * s.hidden + o];
      add_scaled(&d_hw[r * s.inter], d_out, m.down + o * s.inter, s.inter);
      sums.add(&Matrices::down, o * s.inter, d_out, &acts[r * s.inter], s.inter);
      if (!m.down_bias) continue;
      sums.add(&Matrices::down_bias, o, d_out, &rows.act_weight[r], 1);
      d_weight->add(r, d_out * m.down_bias[o]);
    }
  }
  for (double& value : d_hw) value = round_to(without_terms(s, rows.adapters), value);
  add_terms_backward(s.operands, rows.adapters.down, rows.adapter, acts, d_y, &d_hw);
  for (double& value : d_hw) value = round_to(s.between, value);
  Vec d_gate(count * s.inter, 0.0), d_up(count * s.inter, 0.0);
  Vec x_ulps, d_y_ulps;
  for (size_t r = 0; r < count; ++r) {
    x_ulps.push_back(kFp32Ulp * norm(&rows.x[r * s.hidden], s.hidden));
    d_y_ulps.push_back(kFp32Ulp * norm(&d_y[r * s.hidden], s.hidden));
  }
  const Vec down_norms = column_norms(m.down, s.hidden, s.inter);
  for (size_t i = 0; i < d_hw.size(); ++i) d_weight->add(i / s.inter, d_hw[i] * rows.h[i]);
  for (size_t i = 0; i < s.inter; ++i) {
    const double gate_norm = m.gate ? norm(m.gate + i * s.hidden, s.hidden) : 0;
    const double up_norm = norm(m.up + i * s.hidden, s.hidden);
    for (size_t r = 0; r < count; ++r) {
      const size_t at_i = r * s.inter + i;
      const double* x = &rows.x[r * s.hidden];
      const double weight = rows.act_weight[r];
      const Slopes slopes = slopes_at(s, rows.g[at_i], rows.u[at_i]);
      Slopes shifts;
      if (s.shifts)
        shifts =
            slope_shifts(s, rows.g[at_i], rows.u[at_i], gate_norm * x_ulps[r], up_norm * x_ulps[r]);
      const auto shift = [&](double slope, double of_slope) {  // of slope * d_hw * weight
        if (!s.shifts) return 0.0;
        const double of_d_hw = down_norms[i] * d_y_ulps[r];
        return std::abs(weight) * (of_slope * std::abs(d_hw[at_i]) + std::abs(slope) * of_d_hw);
      };
      const double dg = round_to(s.operands, slopes.gate * d_hw[at_i] * weight);
      const double du = round_to(s.operands, slopes.up * d_hw[at_i] * weight);
      const double gate_shift = shift(slopes.gate, shifts.gate);
      const double up_shift = shift(slopes.up, shifts.up);
      d_gate[at_i] = dg;
      d_up[at_i] = du;
      add_scaled(&(*d_x)[r * s.hidden], du, m.up + i * s.hidden, s.hidden);
      sums.add(&Matrices::up, i * s.hidden, du, x, s.hidden, up_shift);
      sums.add(&Matrices::up_bias, i, du, &kOne, 1, up_shift);
      if (!m.gate) continue;
      add_scaled(&(*d_x)[r * s.hidden], dg, m.gate + i * s.hidden, s.hidden);
      sums.add(&Matrices::gate, i * s.hidden, dg, x, s.hidden, gate_shift);
      sums.add(&Matrices::gate_bias, i, dg, &kOne, 1, gate_shift);
    }
  }
  add_terms_backward(s.operands, rows.adapters.gate, rows.adapter, rows.x, d_gate, d_x);
  add_terms_backward(s.operands, rows.adapters.up, rows.adapter, rows.x, d_up, d_x);
}

}  // namespace moec::oracle
