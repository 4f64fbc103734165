// SPDX-License-Identifier: Apache-2.0
#include "quant_draw.h"

#include <utility>

#include "layer_runner.h"

namespace moec::test {
namespace {

using oracle::Vec;

// Expert 0 has no rows, expert 1 many of them, the last ones few.
void route(QuantProblem* p, int many, Random* random) {
  p->tokens = many;
  for (int t = 0; t < many; ++t) {
    const int second = 2 + int(random->below(p->experts - 2));
    p->ids.insert(p->ids.end(), {1, t < 20 ? second : 2});
    for (int slot = 0; slot < 2; ++slot)
      p->routing_weights.push_back(
          oracle::round_to(oracle::Rounding::kFp32, random->uniform() + 0.25));
  }
  p->top_k = 2;
}

// The matrices of p in formats at random. null: they are plain.
void draw_matrices(const QuantCase* gate_up, const QuantCase* down, const QuantShape& shape,
                   Random* random, QuantProblem* p) {
  const bool up_in_out = shape.gate_up_in_out, plain = p->gate_layout == MOEC_GATE_NONE;
  const auto matrix = [&](const QuantCase& c, int N, int K, bool in_out, int parts) {
    return random_quant_matrix(c, shape, N, K, in_out, parts, p->experts, random);
  };
  if (gate_up && !plain && p->gate_layout != MOEC_GATE_SPLIT) {
    p->gate_up = matrix(*gate_up, 2 * p->inter, p->hidden, up_in_out, 2);
    for (Quantised& q : p->gate_up) {
      q.alternating = p->gate_layout == MOEC_GATE_INTERLEAVED;
      q.part_of_first_is_second = p->gate_layout == MOEC_UP_THEN_GATE;
    }
  } else if (gate_up) {
    if (!plain) p->gate = matrix(*gate_up, p->inter, p->hidden, up_in_out, 1);
    p->up = matrix(*gate_up, p->inter, p->hidden, up_in_out, 1);
  }
  if (down) p->down = matrix(*down, p->hidden, p->inter, shape.down_in_out, 1);
}

}  // namespace

QuantisedMatrix random_quant_matrix(const QuantCase& c, const QuantShape& shape, int N, int K,
                                    bool in_out, int parts, int experts, Random* random) {
  QuantisedMatrix matrix;
  if (!shape.per_expert) return {random_quantised(c, experts, N, K, in_out, parts, random)};
  for (int e = 0; e < experts; ++e) {
    matrix.push_back(random_quantised(c, 1, N, K, in_out, parts, random));
    matrix[size_t(e)].codebook = matrix[0].codebook;  // one serves all experts
    matrix[size_t(e)].scale_book = matrix[0].scale_book;
  }
  return matrix;
}

QuantProblem random_quant_problem(const QuantCase& c, const QuantShape& shape, moec_dtype dtype,
                                  int many, Random* random, int experts) {
  QuantProblem p;
  p.dtype = dtype;
  p.gate_layout = shape.gate_layout;
  p.experts = experts;
  p.whole_shape = c.whole_shape;
  p.hidden = shape.hidden;
  p.inter = shape.inter;
  const bool plain = p.gate_layout == MOEC_GATE_NONE;
  if (plain) p.activation.kind = oracle::Act::kRelu2;
  route(&p, many, random);
  const size_t values = size_t(p.tokens) * size_t(p.hidden);
  p.x = random->normals(values);
  p.d_y = random->normals(values);
  for (Vec* v : {&p.x, &p.d_y})
    for (double& value : *v) value = oracle::round_to(rounding_of(dtype), value);
  draw_matrices(&c, &c, shape, random, &p);
  const auto bias = [&](int rows) {
    Vec v = random->normals(size_t(p.experts) * size_t(rows), 0.5);
    for (double& value : v) value = oracle::round_to(rounding_of(dtype), value);
    return v;
  };
  if (!plain) p.values.gate_bias = bias(p.inter);
  p.values.up_bias = bias(p.inter);
  p.values.down_bias = bias(p.hidden);
  return p;
}

DrawnCodes::DrawnCodes(const QuantCase* gate_up, const QuantCase* down, const QuantShape& shape_of,
                       int experts, Random* random) {
  QuantShape shape = shape_of;
  const auto orientation = [](const QuantCase* c, bool in_out) {
    return c ? c->only_in_out || (in_out && !c->only_out_in) : in_out;
  };
  shape.gate_up_in_out = orientation(gate_up, shape.gate_up_in_out);
  shape.down_in_out = orientation(down, shape.down_in_out);
  matrices_.gate_layout = shape.gate_layout;
  matrices_.experts = experts;
  matrices_.hidden = shape.hidden;
  matrices_.inter = shape.inter;
  draw_matrices(gate_up, down, shape, random, &matrices_);
  bound_.gate_up_orientation = shape.gate_up_in_out ? MOEC_IN_OUT : MOEC_OUT_IN;
  bound_.down_orientation = shape.down_in_out ? MOEC_IN_OUT : MOEC_OUT_IN;
  const auto bind = [&](const QuantisedMatrix& from, const QuantCase* c, moec_matrix* to) {
    if (!from.empty()) *to = binder_.matrix(from, c->whole_shape);
  };
  bind(matrices_.gate_up, gate_up, &bound_.set.gate_up);
  bind(matrices_.gate, gate_up, &bound_.set.gate);
  bind(matrices_.up, gate_up, &bound_.set.up);
  bind(matrices_.down, down, &bound_.set.down);
  if (gate_up) bound_.gate_up_scheme = uint32_t(gate_up->scheme);
  if (down) bound_.down_scheme = uint32_t(down->scheme);
}

void DrawnCodes::replace(moec_dtype dtype, oracle::MlpWeights* weights) {
  matrices_.dtype = dtype;
  matrices_.values = std::move(*weights);
  *weights = matrices_.dequantised();
}

}  // namespace moec::test
