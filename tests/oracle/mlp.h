// SPDX-License-Identifier: Apache-2.0
// One MLP of the oracle: what R rows compute in it, forward and backward.
#pragma once

#include <cmath>
#include <cstddef>

#include "adapters.h"

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
inline void take_roots(Vec* v) {
  for (double& value : *v) value = std::sqrt(value);
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
  bool terms_apart = true;
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
inline void mlp_forward(const Shape& s, const Mlp<const double*>& m, MlpRows* rows) {
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

// What mlp_backward adds to: gradients, and the squares of the terms that they are sums of.
struct MlpSums {
  Mlp<double*> d, squares;
  void add(double* Mlp<double*>::* matrix, size_t at, double a, const double* x, size_t n) const {
    if (!(d.*matrix)) return;
    add_scaled(d.*matrix + at, a, x, n);
    add_squares(squares.*matrix + at, a, x, n);
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
inline void mlp_backward(const Shape& s, const Mlp<const double*>& m, const MlpRows& rows,
                         const Vec& d_y, const MlpSums& sums, Vec* d_x, WeightSums* d_weight) {
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
  for (size_t i = 0; i < d_hw.size(); ++i) d_weight->add(i / s.inter, d_hw[i] * rows.h[i]);
  for (size_t i = 0; i < s.inter; ++i) {
    for (size_t r = 0; r < count; ++r) {
      const size_t at_i = r * s.inter + i;
      const double* x = &rows.x[r * s.hidden];
      double dg = 0;
      double du = 0;
      activate_backward(s.act, rows.g[at_i], rows.u[at_i], &dg, &du, s.fault);
      dg = round_to(s.operands, dg * d_hw[at_i] * rows.act_weight[r]);
      du = round_to(s.operands, du * d_hw[at_i] * rows.act_weight[r]);
      d_gate[at_i] = dg;
      d_up[at_i] = du;
      add_scaled(&(*d_x)[r * s.hidden], du, m.up + i * s.hidden, s.hidden);
      sums.add(&Matrices::up, i * s.hidden, du, x, s.hidden);
      sums.add(&Matrices::up_bias, i, du, &kOne, 1);
      if (!m.gate) continue;
      add_scaled(&(*d_x)[r * s.hidden], dg, m.gate + i * s.hidden, s.hidden);
      sums.add(&Matrices::gate, i * s.hidden, dg, x, s.hidden);
      sums.add(&Matrices::gate_bias, i, dg, &kOne, 1);
    }
  }
  add_terms_backward(s.operands, rows.adapters.gate, rows.adapter, rows.x, d_gate, d_x);
  add_terms_backward(s.operands, rows.adapters.up, rows.adapter, rows.x, d_up, d_x);
}

}  // namespace moec::oracle
