// SPDX-License-Identifier: Apache-2.0
#include "unit/experts_case.h"

namespace moec::test {
namespace {

moec_activation activation_of(uint32_t kind, oracle::Activation* reference) {
  moec_activation act = {};
  act.kind = kind;
  reference->kind = oracle::Act(kind);
  if (kind == MOEC_ACT_GPTOSS || kind == MOEC_ACT_QUICK_GEGLU) act.alpha = 1.5f;
  if (kind >= MOEC_ACT_GPTOSS && kind <= MOEC_ACT_SWIGLU_CLAMP) act.limit = 1.0f;
  if (kind == MOEC_ACT_QUICK_GEGLU) act.offset = 1.0f;
  if (kind == MOEC_ACT_SITU) act.beta = 2.0f, act.linear_beta = 3.0f;
  reference->alpha = act.alpha, reference->limit = act.limit, reference->offset = act.offset;
  reference->beta = act.beta, reference->linear_beta = act.linear_beta;
  return act;
}

oracle::MlpWeights random_mlp(Random& random, moec_dtype dtype, bool gated, bool bias, int E, int H,
                              int I) {
  const auto values = [&](int64_t count, double size) {
    return representable(dtype, random.normals(size_t(count), size));
  };
  const double up = 1 / std::sqrt(H), down = 1 / std::sqrt(I);
  oracle::MlpWeights w;
  if (gated) w.gate = values(int64_t(E) * I * H, up);
  w.up = values(int64_t(E) * I * H, up);
  w.down = values(int64_t(E) * H * I, down);
  if (bias && gated) w.gate_bias = values(int64_t(E) * I, 0.5);
  if (bias) w.up_bias = values(int64_t(E) * I, 0.5);
  if (bias) w.down_bias = values(int64_t(E) * H, 0.5);
  return w;
}

// Distinct ids of [0, E + Z), some slots without an expert, some with weight 0.
oracle::Route random_route(Random& random, const ExpertsCase& c) {
  oracle::Route route;
  route.slots = c.top_k;
  for (int t = 0; t < c.tokens; ++t) {
    std::vector<int> ids(size_t(c.experts + c.zero));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = int(i);
    for (int k = 0; k < c.top_k; ++k) {
      std::swap(ids[size_t(k)], ids[size_t(k + random.below(int64_t(ids.size()) - k))]);
      const bool none = random.below(16) == 0, zero = random.below(16) == 0;
      route.ids.push_back(none ? -1 : ids[size_t(k)]);
      route.weights.push_back(none || zero ? 0 : double(float(0.2 + random.uniform())));
    }
  }
  return route;
}

}  // namespace

ExpertsProblem::ExpertsProblem(const ExpertsCase& given) : c(given) {
  Random random(uint64_t(c.tokens * 1000 + c.hidden));
  const int end = c.end ? c.end : c.experts, local = end - c.begin, T = c.tokens, H = c.hidden;
  desc.hidden = H, desc.inter = c.inter, desc.shared_inter = c.shared_inter;
  desc.num_experts = c.experts, desc.num_zero_experts = c.zero,
  desc.top_k = c.capacity ? 0 : c.top_k;
  desc.expert_begin = c.begin, desc.expert_end = end, desc.align = c.align;
  desc.max_rows_base = int64_t(local) * c.capacity;
  desc.gate_layout = gated() ? MOEC_GATE_SPLIT : MOEC_GATE_NONE;
  desc.dtype = c.dtype;
  desc.activation = activation_of(c.act, &config.experts.activation);
  desc.shared_activation = activation_of(c.shared_act, &config.experts.shared_activation);
  desc.weight_position = c.position, desc.combine = c.combine, desc.act_rounding = c.rounding;
  desc.shared = c.shared, desc.save = c.save, desc.output_scale = c.scale;

  config.router.num_experts = c.experts, config.router.num_zero_experts = c.zero;
  config.router.top_k = c.top_k;
  config.experts.hidden = H, config.experts.inter = c.inter;
  config.experts.shared_inter = c.shared_inter;
  config.experts.weight_position = oracle::WeightPosition(c.position);
  config.experts.shared = oracle::Shared(c.shared), config.experts.output_scale = c.scale;
  config.plan.expert_begin = c.begin, config.plan.expert_end = c.end, config.plan.align = c.align;

  const auto values = [&](int count, double size) {
    return representable(c.dtype, random.normals(size_t(count), size));
  };
  in.tokens = T;
  in.x = values(T * H, c.input_size);
  in.experts = random_mlp(random, c.dtype, gated(), c.bias, local, H, c.inter);
  if (c.shared)
    in.shared = random_mlp(random, c.dtype, shared_gated(), c.bias, 1, H, c.shared_inter);
  const int gates = c.shared == MOEC_SHARED_SOFTMAX2 ? 2 : c.shared == MOEC_SHARED_SIGMOID_GATE;
  in.shared_gate = values(gates * H, 1 / std::sqrt(H));
  if (gates == 2) in.shared_gate_bias = values(2, 1);
  if (c.output_bias) in.output_bias = values(H, 1);
  if (c.residual) in.residual = values(T * H, 1);
  if (c.capacity) {
    route = oracle::expert_choice(random.normals(size_t(T * c.experts), 1), T, c.experts,
                                  c.capacity, {});
    for (double& w : route.weights) w = double(float(w));
  } else {
    route = random_route(random, c);
  }
  plan.bind(c, config, route);
  x = Stored(c.dtype, in.x), shared_gate = Stored(c.dtype, in.shared_gate);
  shared_gate_bias = Stored(c.dtype, in.shared_gate_bias);
  output_bias = Stored(c.dtype, in.output_bias), residual = Stored(c.dtype, in.residual);
  d_y = Stored(c.dtype, values(T * H, 1));
  experts.place(c.layout, c.dtype, gated(), local, H, c.inter, c.bias);
  experts.write(in.experts);
  if (!c.shared) return;
  shared.place(c.layout, c.dtype, shared_gated(), 1, H, c.shared_inter, c.bias);
  shared.write(in.shared);
}

ExpertsProblem::Output ExpertsProblem::forward(const cpu::Device& device) {
  const Backend::Sizes sizes = cpu::experts_sizes(device, desc);
  const GuardedBuffer workspace(bytes_for(sizes.forward, c.tokens), GuardedBuffer::Side::kStart);
  const GuardedBuffer saved(bytes_for(sizes.saved, c.tokens));
  if (c.packed && !experts.view.packed) {
    experts.pack(device);
    if (c.shared) shared.pack(device);
  }
  Output out;
  out.y = Stored(c.dtype, size_t(c.tokens * c.hidden));
  ExpertsArgs args = {};
  args.desc = &desc;
  args.num_tokens = c.tokens;
  args.plan = &plan.view;
  args.weights = &experts.view;
  args.shared_weights = c.shared ? &shared.view : nullptr;
  args.x = x.array();
  args.shared_gate = shared_gate.array(), args.shared_gate_bias = shared_gate_bias.array();
  args.output_bias = output_bias.array(), args.residual = residual.array().data;
  args.y = out.y.data();
  args.saved = c.save == MOEC_SAVE_NONE ? nullptr : saved.data();
  args.workspace = workspace.data();
  cpu::experts_forward(device, args);
  EXPECT_TRUE(workspace.slack_is_untouched());
  const auto* const bytes = saved.data<uint8_t>();
  out.saved.assign(bytes, bytes + saved.size());
  return out;
}

}  // namespace moec::test
