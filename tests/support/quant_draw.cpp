// SPDX-License-Identifier: Apache-2.0
#include "quant_draw.h"

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
  const bool up_in_out = shape.gate_up_in_out, joined = !plain && p.gate_layout != MOEC_GATE_SPLIT;
  const auto matrix = [&](int N, int K, bool in_out, int parts) {
    return random_quant_matrix(c, shape, N, K, in_out, parts, p.experts, random);
  };
  if (joined) {
    p.gate_up = matrix(2 * p.inter, p.hidden, up_in_out, 2);
    for (Quantised& q : p.gate_up) {
      q.alternating = p.gate_layout == MOEC_GATE_INTERLEAVED;
      q.part_of_first_is_second = p.gate_layout == MOEC_UP_THEN_GATE;
    }
  } else {
    if (!plain) p.gate = matrix(p.inter, p.hidden, up_in_out, 1);
    p.up = matrix(p.inter, p.hidden, up_in_out, 1);
  }
  p.down = matrix(p.hidden, p.inter, shape.down_in_out, 1);
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

}  // namespace moec::test
