// SPDX-License-Identifier: Apache-2.0
#include "ep_problem.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "layer_runner.h"
#include "quant_draw.h"
#include "tensors.h"

namespace moec::test {

using oracle::Vec;

int EpProblem::max_tokens() const {
  return std::max(1, *std::max_element(tokens.begin(), tokens.end()));
}

int EpProblem::owner(int id) const {
  if (id < 0 || id >= experts) return -1;
  return static_cast<int>(std::upper_bound(begin.begin(), begin.end(), id) - begin.begin()) - 1;
}

namespace {

// What the experts [first, last) of so many have of their values.
class Part {
 public:
  Part(int experts, int first, int last) : experts_(experts), first_(first), last_(last) {}
  Vec operator()(const Vec& all) const {
    const auto each = static_cast<int64_t>(all.size()) / experts_;
    return {all.begin() + first_ * each, all.begin() + last_ * each};
  }
  QuantisedMatrix operator()(const QuantisedMatrix& all) const {
    return all.empty() ? all : QuantisedMatrix(all.begin() + first_, all.begin() + last_);
  }
  oracle::Factors operator()(const oracle::Factors& all) const {
    return {all.rank, all.scale, (*this)(all.a), (*this)(all.b)};
  }

 private:
  int experts_, first_, last_;
};

}  // namespace

oracle::MlpWeights EpProblem::weights_of(int first, int last) const {
  const Part part(experts, first, last);
  return {part(weights.gate),      part(weights.up),      part(weights.down),
          part(weights.gate_bias), part(weights.up_bias), part(weights.down_bias)};
}

CodedExperts EpProblem::codes_of(int first, int last) const {
  const Part part(experts, first, last);
  return {part(codes.gate), part(codes.up), part(codes.down)};
}

std::vector<oracle::Adapter> EpProblem::adapters_of(int first, int last) const {
  const Part part(experts, first, last);
  std::vector<oracle::Adapter> own;
  for (const oracle::Adapter& one : adapters)
    own.push_back({part(one.gate), part(one.up), part(one.down)});
  return own;
}

moec_router_desc EpProblem::router_desc() const {
  auto d = sized<moec_router_desc>();
  d.flags = (gate_bias.empty() ? 0 : MOEC_ROUTER_LOGIT_BIAS) |
            (select_bias.empty() ? 0 : MOEC_ROUTER_SELECT_BIAS) |
            (jitter_x ? MOEC_ROUTER_JITTER_X : 0);
  d.num_experts = experts;
  d.num_zero_experts = zero_experts;
  d.top_k = top_k;
  d.norm = MOEC_NORM_SUM;
  d.jitter = jitter_x ? 0.1f : 0.0f;
  d.seed = 5;
  return d;
}

moec_experts_desc EpProblem::experts_desc(int first, int last, bool home) const {
  auto d = sized<moec_experts_desc>();
  d.hidden = hidden;
  d.inter = inter;
  d.num_experts = experts;
  d.top_k = top_k;
  d.expert_begin = first;
  d.expert_end = last;
  d.align = align;
  d.gate_layout = plain ? MOEC_GATE_NONE : MOEC_GATE_SPLIT;
  d.activation.kind = plain ? MOEC_ACT_RELU2 : MOEC_ACT_SWIGLU;
  d.dtype = dtype;
  d.weight_position = weight_position;
  d.combine = combine;
  d.save = save;
  d.output_scale = output_scale;
  if (!home) return d;
  d.num_zero_experts = zero_experts;
  d.shared = shared;
  d.shared_inter = shared_inter;
  return d;
}

namespace {

Vec rounded(Vec values, moec_dtype dtype) {
  return decode(encode(values, dtype), dtype);
}

std::vector<int32_t> draw_ranges(int ranks, int experts, Draw& draw) {
  std::vector<int32_t> begin = {0};
  for (int r = 1; r < ranks; ++r)
    begin.push_back(begin.back() + 1 +
                    static_cast<int>(draw.below(experts - begin.back() - (ranks - r))));
  begin.push_back(experts);
  return begin;
}

}  // namespace

void fill_values(EpProblem* p, Draw& draw) {
  const auto normals = [&](int64_t count, double scale) {
    return rounded(draw.normals(static_cast<size_t>(count), scale), p->dtype);
  };
  const int H = p->hidden;
  for (int r = 0; r < p->ranks; ++r) {
    const int64_t T = p->tokens[static_cast<size_t>(r)];
    p->x.push_back(normals(T * H, 1));
    p->d_y.push_back(normals(T * H, 1));
  }
  p->gate_weight = normals(int64_t{p->columns()} * H, 0.5);
  const auto mlp = [&](int experts, int inter, bool biases, bool gated) {
    oracle::MlpWeights w;
    const int64_t E = experts, I = inter;
    if (gated) w.gate = normals(E * I * H, 0.3);
    w.up = normals(E * I * H, 0.3);
    w.down = normals(E * H * I, 0.3);
    if (!biases) return w;
    if (gated) w.gate_bias = normals(E * I, 0.3);
    w.up_bias = normals(E * I, 0.3);
    w.down_bias = normals(E * H, 0.3);
    return w;
  };
  p->weights = mlp(p->experts, p->inter, draw.chance(0.5), !p->plain);
  if (p->shared) p->shared_weights = mlp(1, p->shared_inter, false, true);
  if (p->shared == MOEC_SHARED_SIGMOID_GATE) p->shared_gate = normals(H, 0.3);
}

std::string quantise_weights(EpProblem* p, Draw& draw, std::string_view name) {
  const oracle::Rounding rounding = rounding_of(p->dtype);
  std::vector<const QuantCase*> fitting;
  for (const QuantCase& c : kQuantCases)
    if (p->hidden % c.multiple_n + p->inter % c.multiple_n + p->hidden % c.multiple_k +
                p->inter % c.multiple_k ==
            0 &&
        (name.empty() || name == c.name))
      fitting.push_back(&c);
  const QuantCase& c = *fitting[size_t(draw.below(int64_t(fitting.size())))];
  const bool in_out = c.only_in_out || (!c.only_out_in && draw.chance(0.5));
  const QuantShape shape = {MOEC_GATE_SPLIT, in_out, in_out, true, p->hidden, p->inter};
  const auto matrix = [&](int rows, int inputs, Vec* values) {
    const auto coded = random_quant_matrix(c, shape, rows, inputs, in_out, 1, p->experts, &draw);
    *values = dequantise(coded, rounding);
    return coded;
  };
  if (!p->plain) p->codes.gate = matrix(p->inter, p->hidden, &p->weights.gate);
  p->codes.up = matrix(p->inter, p->hidden, &p->weights.up);
  p->codes.down = matrix(p->hidden, p->inter, &p->weights.down);
  return c.name;
}

void draw_adapters(EpProblem* p, Draw& draw) {
  AdapterLayout& layout = p->adapter_layout;
  layout.gate_layout = p->plain ? MOEC_GATE_NONE : MOEC_GATE_THEN_UP;
  layout.fused = !p->plain && draw.chance(0.5);
  layout.one_for_all = draw.chance(0.5);
  layout.storage = draw.one_of({FactorStorage::kCompact, FactorStorage::kPeft});
  layout.dtype = p->dtype;
  p->adapters.resize(1 + draw.below(3));
  for (oracle::Adapter& one : p->adapters) {
    const int rank = 1 + static_cast<int>(draw.below(9));
    const auto factors = [&](int rows, int inputs) {
      oracle::Factors f;
      f.rank = rank;
      f.scale = draw.one_of({0.5, 2.0});
      const auto normals = [&](int64_t count) {
        return rounded(draw.normals(static_cast<size_t>(count), 0.3), p->dtype);
      };
      f.b = normals(int64_t{p->experts} * rows * rank);
      const Vec a = normals(int64_t{rank} * inputs * (layout.one_for_all ? 1 : p->experts));
      for (int e = 0; f.a.size() < size_t(p->experts) * size_t(rank) * size_t(inputs); ++e)
        f.a.insert(f.a.end(), a.begin(), a.end());
      return f;
    };
    one.up = factors(p->inter, p->hidden);
    if (!p->plain) {
      one.gate = factors(p->inter, p->hidden);
      if (layout.fused) one.up.a = one.gate.a, one.up.scale = one.gate.scale;
    }
    one.down = factors(p->hidden, p->inter);
  }
  if (p->adapters.size() == 1 || draw.chance(0.4)) return;
  for (const int T : p->tokens) {
    p->adapter_ids.emplace_back();
    for (int t = 0; t < T; ++t)
      p->adapter_ids.back().push_back(static_cast<int>(draw.below(p->adapters.size() + 1)) - 1);
  }
}

EpProblem draw_ep_problem(int ranks, uint32_t scheme, Draw& draw) {
  EpProblem p;
  p.ranks = ranks;
  p.scheme = scheme;
  p.experts = ranks + static_cast<int>(draw.below(8)) + 1;
  p.zero_experts = draw.one_of({0, 0, 2});
  p.top_k = 1 + static_cast<int>(draw.below(std::min(p.experts, 4)));
  p.hidden = draw.one_of({8, 16, 33, 64});
  p.inter = draw.one_of({8, 12, 32, 40});
  p.shared = draw.one_of<uint32_t>(
      {MOEC_SHARED_NONE, MOEC_SHARED_NONE, MOEC_SHARED_ADD, MOEC_SHARED_SIGMOID_GATE});
  p.shared_inter = p.shared ? draw.one_of({8, 24}) : 0;
  p.save = draw.one_of<uint32_t>({MOEC_SAVE_INPUT, MOEC_SAVE_PREACT, MOEC_SAVE_ALL});
  p.weight_position = static_cast<uint32_t>(draw.below(3));
  p.combine = draw.one_of<uint32_t>({MOEC_COMBINE_FP32_SLOT, MOEC_COMBINE_FP32_EXPERT});
  p.drop = draw.one_of<uint32_t>(
      {MOEC_DROP_NONE, MOEC_DROP_NONE, MOEC_DROP_BY_POSITION, MOEC_DROP_BY_WEIGHT});
  p.capacity_factor = p.drop ? draw.one_of({0.5f, 1.0f, 1.25f}) : 0.0f;
  p.output_scale = draw.one_of({0.0f, 0.5f});
  p.align = draw.one_of({0, 8});
  p.plain = draw.chance(0.2);
  p.jitter_x = draw.chance(0.2);
  p.accumulate = draw.chance(0.3);
  p.dtype = draw.one_of<moec_dtype>({MOEC_F32, MOEC_F32, MOEC_BF16, MOEC_F16});
  p.grad_dtype = draw.chance(0.5) ? p.dtype : moec_dtype{MOEC_F32};
  p.begin = draw_ranges(ranks, p.experts, draw);
  for (int r = 0; r < ranks; ++r)
    p.tokens.push_back(draw.chance(0.2) ? 0 : static_cast<int>(draw.below(24)));
  p.bound = draw.one_of<int64_t>({0, p.max_tokens()});
  fill_values(&p, draw);
  const auto normals = [&](int64_t count) {
    return rounded(draw.normals(static_cast<size_t>(count), 0.3), p.dtype);
  };
  if (draw.chance(0.3)) p.gate_bias = normals(p.columns());
  if (draw.chance(0.3))
    p.select_bias = rounded(draw.normals(static_cast<size_t>(p.columns()), 0.3), MOEC_F32);
  if (draw.chance(0.3)) p.output_bias = normals(p.hidden);
  const bool residual = draw.chance(0.3), mask = draw.chance(0.3);
  for (const int T : p.tokens) {
    if (residual) p.residual.push_back(normals(int64_t{T} * p.hidden));
    if (!mask) continue;
    p.token_mask.emplace_back();
    for (int t = 0; t < T; ++t) p.token_mask.back().push_back(draw.chance(0.8) ? 1 : 0);
  }
  return p;
}

}  // namespace moec::test
