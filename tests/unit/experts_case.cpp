// SPDX-License-Identifier: Apache-2.0
#include "unit/experts_case.h"

#include "experts/experts.h"

#include <algorithm>

namespace moec::test {
namespace {

moec_activation activation_of(uint32_t kind, oracle::Activation* reference) {
  moec_activation act = {};
  act.kind = kind;
  reference->kind = oracle::Act(kind);
  const oracle::ActInfo& reads = info_of(reference->kind);
  if (reads.alpha) act.alpha = 1.5f;
  if (reads.limit) act.limit = 1.0f;
  if (reads.offset) act.offset = 1.0f;
  if (reads.beta) act.beta = 2.0f, act.linear_beta = 3.0f;
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

// What the CPU rounds on the way from x to y and back. fp32 is as good as exact here.
void set_roundings(const ExpertsCase& c, oracle::ExpertsConfig* e) {
  if (c.dtype == MOEC_F32) return;
  const auto type = c.dtype == MOEC_BF16 ? oracle::Rounding::kBf16 : oracle::Rounding::kFp16;
  e->operands = type;
  if (c.combine == MOEC_COMBINE_DATA_EXPERT) e->sums = type;
  if (c.rounding == MOEC_ACT_PER_OP) e->activation.steps = e->shared_activation.steps = type;
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
  if (c.tokens > 0) {  // at least one real expert with weight 0
    std::replace(route.ids.begin(), route.ids.begin() + c.top_k, c.begin, -1);
    route.ids[0] = c.begin, route.weights[0] = 0;
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
  set_roundings(c, &config.experts);
  config.experts.shifts = true;
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
  const cpu::CpuExperts path(device.pool, *device.host);
  const ExpertsPath* const paths[] = {&path};
  const experts::Sizes sizes = experts::sizes(paths, desc);
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
  experts::forward(paths, args, nullptr);
  EXPECT_TRUE(workspace.slack_is_untouched());
  const auto* const bytes = saved.data<uint8_t>();
  out.saved.assign(bytes, bytes + saved.size());
  return out;
}

std::unique_ptr<ExpertsProblem::Gradients> ExpertsProblem::backward(
    const cpu::Device& device, const std::vector<uint8_t>& saved, const Wanted& wanted) {
  const cpu::CpuExperts path(device.pool, *device.host);
  const ExpertsPath* const paths[] = {&path};
  const experts::Sizes sizes = experts::sizes(paths, desc);
  const GuardedBuffer workspace(bytes_for(sizes.backward, c.tokens), GuardedBuffer::Side::kStart);
  auto g = std::make_unique<Gradients>();
  const auto make = [&](Stored& to, bool want, moec_dtype dtype, size_t count) {
    // Accumulated ones start at 1: the result is 1 more.
    if (want) to = c.accumulate ? Stored(dtype, oracle::Vec(count, 1.0)) : Stored(dtype, count);
    return to.array();
  };
  const auto place = [&](BoundMlp& to, const BoundMlp& like) {
    const WeightsView& v = like.view;
    to.place(c.layout, c.grad_dtype, v.gated, v.num_experts, v.hidden, v.inter,
             c.bias && wanted.bias);
    if (c.accumulate) to.fill(1);
    to.drop(wanted.inner, wanted.down);
  };
  const size_t T = size_t(c.tokens), H = size_t(c.hidden);
  const size_t rows = size_t(plan.view.max_rows);
  ExpertsGradArgs args = {};
  args.desc = &desc, args.num_tokens = c.tokens, args.plan = &plan.view;
  args.accumulate = args.accumulate_x = c.accumulate;
  args.weights = &experts.view, args.shared_weights = c.shared ? &shared.view : nullptr;
  args.x = x.array();
  args.shared_gate = shared_gate.array(), args.shared_gate_bias = shared_gate_bias.array();
  args.d_y = d_y.data(), args.saved = saved.data(), args.workspace = workspace.data();
  args.d_x = make(g->x, wanted.x, c.dtype, T * H).data;
  const size_t entries = c.capacity ? rows : T * size_t(c.top_k);
  if (wanted.routing) g->routing = Stored(MOEC_F32, entries);
  args.d_routing_weights = static_cast<float*>(g->routing.array().data);
  if (wanted.inner || wanted.down || wanted.bias)
    place(g->experts, experts), args.d_expert_weights = &g->experts.view;
  if (c.shared && args.d_expert_weights)
    place(g->shared, shared), args.d_shared_weights = &g->shared.view;
  args.d_shared_gate = make(g->shared_gate, wanted.gate, c.grad_dtype, in.shared_gate.size());
  args.d_shared_gate_bias =
      make(g->shared_gate_bias, wanted.gate, c.grad_dtype, in.shared_gate_bias.size());
  args.d_output_bias = make(g->output_bias, wanted.rest && c.output_bias, c.grad_dtype, H);
  if (wanted.rest && c.residual) g->residual = Stored(c.dtype, T * H);
  args.d_residual = g->residual.array().data;
  experts::backward(paths, args, nullptr);
  EXPECT_TRUE(workspace.slack_is_untouched());
  return g;
}

double ExpertsProblem::gradient_error(const Gradients& g, std::string* worst) const {
  oracle::Gradients ref;
  const oracle::Vec d_x =
      oracle::experts_backward(config, in, in.x, route, plan.plan, d_y.values(), &ref);
  if (c.capacity) {  // by row there
    oracle::Vec rows(size_t(plan.view.max_rows), 0.0);
    for (size_t a = 0; a < plan.plan.assignment_row.size(); ++a)
      if (plan.plan.assignment_row[a] >= 0)
        rows[size_t(plan.plan.assignment_row[a])] = ref.routing_weights[a];
    ref.routing_weights = rows;
  }
  double largest = 0;
  const auto check = [&](const char* name, oracle::Vec got, oracle::Vec want, int columns,
                         bool sums, double floor = kRowFloor, const oracle::Vec& terms = {},
                         const oracle::Vec& shifts = {}) {
    if (got.empty()) return;
    if (sums && c.accumulate)
      for (double& v : want) v += 1;
    const double error = row_error(got, want, size_t(columns), floor, terms, shifts).error;
    if (error > largest) largest = error, *worst = name;
  };
  const auto check_mlp = [&](const BoundMlp& got, const oracle::MlpWeights& want,
                             const oracle::MlpWeights& terms, const oracle::MlpWeights& shifts,
                             int I) {
    const double of_row = c.tokens == 1 ? kTypicalRow : kRowFloor;  // a row is one sum times x
    const double floor = kRowFloor;
    check("gate", got.gate.values(), want.gate, c.hidden, true, of_row, terms.gate, shifts.gate);
    check("up", got.up.values(), want.up, c.hidden, true, of_row, terms.up, shifts.up);
    check("down", got.down.values(), want.down, I, true, floor, terms.down);
    check("gate bias", got.gate.bias_values(), want.gate_bias, I, true, floor, terms.gate_bias,
          shifts.gate_bias);
    check("up bias", got.up.bias_values(), want.up_bias, I, true, floor, terms.up_bias,
          shifts.up_bias);
    check("down bias", got.down.bias_values(), want.down_bias, c.hidden, true, floor,
          terms.down_bias);
  };
  check("x", g.x.values(), d_x, c.hidden, true);
  const int columns = c.capacity ? int(plan.view.max_rows) : c.top_k;
  check("routing weights", g.routing.values(), ref.routing_weights, columns, false, kTypicalRow);
  check_mlp(g.experts, ref.experts, ref.terms.experts, ref.shifts.experts, c.inter);
  check_mlp(g.shared, ref.shared, ref.terms.shared, ref.shifts.shared, c.shared_inter);
  check("shared gate", g.shared_gate.values(), ref.shared_gate, c.hidden, true);
  check(
      "shared gate bias", g.shared_gate_bias.values(), ref.shared_gate_bias, 2, true,
      std::max(kRowFloor, floor_of_sums(ref.shared_gate_bias, ref.shared_gate, size_t(c.hidden))));
  check("output bias", g.output_bias.values(), ref.output_bias, c.hidden, true);
  check("residual", g.residual.values(), ref.residual, c.hidden, false);
  return largest;
}

}  // namespace moec::test
