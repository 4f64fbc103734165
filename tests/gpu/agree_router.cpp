// SPDX-License-Identifier: Apache-2.0
// Random routers, every feature: ids, weights, scores, counts and gradients bit for bit; gates
// within the rounding of their products.
#include <algorithm>
#include <limits>

#include "gpu/agree.h"
#include "oracle/kinds.h"

namespace moec::test {
namespace {

constexpr int64_t kTokens[] = {0, 1, 5, 33, 64, 257, 1500};

struct RouterCase {
  moec_router_desc desc;
  int64_t tokens, ids;  // T, E+Z
  std::string name;
};

void draw_selection(TensorDraw& draw, int64_t ids, moec_router_desc& desc) {
  desc.selection = draw.one_of<uint32_t>(
      {MOEC_SELECT_TOPK, MOEC_SELECT_TOPK, MOEC_SELECT_GROUP_TOPK, MOEC_SELECT_GROUP_TOPK,
       MOEC_SELECT_TABLE, MOEC_SELECT_GIVEN, MOEC_SELECT_SPARSE_MIXER});
  if (desc.selection == MOEC_SELECT_SPARSE_MIXER && ids >= 2) {
    desc.top_k = 2;
    desc.mixer_eps = draw.one_of({0.01f, 0.2f, 2.0f});
    return;
  }
  if (desc.selection == MOEC_SELECT_SPARSE_MIXER) desc.selection = MOEC_SELECT_TOPK;
  desc.weight_rule = uint32_t(draw.below(3));
  if (draw.chance(0.4)) desc.flags |= MOEC_ROUTER_SELECT_BIAS;
  if (desc.selection != MOEC_SELECT_GROUP_TOPK) return;
  do desc.num_groups = 1 + int32_t(draw.below(ids));
  while (ids % desc.num_groups != 0);
  desc.top_groups = 1 + int32_t(draw.below(desc.num_groups));
  desc.group_top_m = int32_t(draw.below(std::min<int64_t>(4, ids / desc.num_groups + 1)));
  desc.group_fill = uint32_t(draw.below(2));
  if (desc.group_fill == MOEC_FILL_NEG_INF)
    desc.top_k = int32_t(std::min<int64_t>(desc.top_k, desc.top_groups * ids / desc.num_groups));
}

RouterCase draw_router(TensorDraw& draw) {
  RouterCase c = {};
  moec_router_desc& desc = c.desc = sized<moec_router_desc>();
  desc.num_experts = draw.one_of({1, 2, 8, 12, 60, 64, 100, 128, 256, 384, 1000, 7000});
  desc.num_zero_experts = draw.chance(0.3) ? 1 + int32_t(draw.below(8)) : 0;
  c.ids = desc.num_experts + desc.num_zero_experts;
  desc.top_k = 1 + int32_t(draw.below(std::min<int64_t>(c.ids, draw.chance(0.1) ? 40 : 10)));
  draw_selection(draw, c.ids, desc);
  if (draw.chance(0.3)) desc.logit_softcap = 5.0f;
  desc.score = uint32_t(draw.below(std::size(oracle::kScores)));
  desc.norm = uint32_t(draw.below(4));
  desc.norm_eps = draw.chance(0.3) ? 0.0f : draw.one_of({1e-20f, 1e-9f, 0.3f});
  if (desc.norm == MOEC_NORM_P) {
    desc.norm_eps = 0;
    desc.norm_p = draw.one_of({1.0f, 2.0f, 1.7f, 0.5f});
  }
  if (draw.chance(0.5)) desc.scale = 2.5f;
  desc.score_precision = uint32_t(draw.below(2));
  desc.norm_precision = uint32_t(draw.below(2));
  desc.weight_precision = uint32_t(draw.below(2));
  desc.slot_order = uint32_t(draw.below(2));
  desc.data_dtype = draw.real();
  if (draw.chance(0.3)) desc.flags |= MOEC_ROUTER_PER_EXPERT_SCALE;
  if (draw.chance(0.3)) desc.flags |= MOEC_ROUTER_NORM_IF_K_GT_1;
  c.tokens = kTokens[draw.below(c.ids > 1000 ? 4 : 7)];
  char name[160];
  std::snprintf(name, sizeof name, "router E=%d Z=%d K=%d T=%d select %u score %u rule %u norm %u",
                desc.num_experts, desc.num_zero_experts, desc.top_k, int(c.tokens), desc.selection,
                desc.score, desc.weight_rule, desc.norm);
  c.name = name;
  return c;
}

struct RouterInputs {
  Values logits, select_bias, scale, mask, table, token_ids, given, counts;
  Values d_routing_weights, d_logits_in, d_scale;
  bool masked, scores, counted, adds_loss, accumulate;
};

RouterInputs draw_inputs(TensorDraw& draw, const RouterCase& c) {
  const int64_t T = c.tokens, N = c.ids, K = c.desc.top_k;
  RouterInputs in;
  in.logits = draw.normals(draw.real(), {T, N}, 2.0, draw.chance(0.4) ? 0.5 : 0);
  const double inf = std::numeric_limits<double>::infinity(), nan = double(NAN);
  if (draw.chance(0.3))
    for (int64_t i = 0; i < T * N / 8; ++i)
      in.logits.of[draw.below(T * N)] = draw.one_of({nan, -nan, inf, -inf, -inf, 0.0, -0.0});
  if (draw.chance(0.2))  // rows of one value: nothing to choose from, or to divide by
    for (int64_t t = 0; t < T; ++t)
      if (const double all = draw.one_of({-inf, -300.0, nan, 1.0}); all != 1.0)
        std::fill_n(in.logits.of.begin() + t * N, N, all);
  in.select_bias = draw.normals(MOEC_F32, {N}, 0.3, draw.chance(0.3) ? 0.25 : 0);
  for (int64_t e = 0; draw.chance(0.2) && e < N; e += 1 + draw.below(9))
    in.select_bias.of[e] = draw.one_of({nan, -nan, inf, -inf});
  in.scale = draw.normals(draw.real(), {N}, 1.0);
  in.mask = draw.integers(draw.one_of<moec_dtype>({MOEC_U8, MOEC_BOOL}), {T}, 0, 2);
  in.table = draw.integers(draw.one_of<moec_dtype>({MOEC_I32, MOEC_I64}), {50, K}, -1, N + 1);
  in.token_ids = draw.integers(draw.one_of<moec_dtype>({MOEC_I32, MOEC_I64}), {T}, -1, 51);
  in.given = draw.integers(draw.one_of<moec_dtype>({MOEC_I32, MOEC_I64}), {T, K}, -1, N + 1);
  in.counts = draw.integers(draw.one_of<moec_dtype>({MOEC_I32, MOEC_I64}), {N}, 0, 100);
  if (draw.chance(0.3))  // one that ends, or would end, at 2^31 - 1
    for (double& count : in.counts.of)
      count = double(INT32_MAX) - double(draw.below(1 + 2 * T * K / N));
  in.d_routing_weights = draw.normals(MOEC_F32, {T, K}, 1.0);
  in.d_logits_in = draw.normals(MOEC_F32, {T, N}, 1.0);
  in.d_scale = draw.normals(draw.real(), {N}, 1.0);
  in.masked = draw.chance(0.3);
  in.scores = draw.chance(0.5);
  in.counted = draw.chance(0.5);
  in.adds_loss = draw.chance(0.5);
  in.accumulate = draw.chance(0.5);
  return in;
}

std::vector<Result> route(Side& side, const RouterCase& c, const RouterInputs& in) {
  const int64_t T = c.tokens, N = c.ids, K = c.desc.top_k;
  const auto router = make<Router>(moec_router_create, side.context(), &c.desc);
  auto args = sized<moec_route_args>();
  args.logits = side.in(in.logits);
  if (c.desc.flags & MOEC_ROUTER_SELECT_BIAS) args.select_bias = side.in(in.select_bias);
  if (c.desc.flags & MOEC_ROUTER_PER_EXPERT_SCALE) args.per_expert_scale = side.in(in.scale);
  if (in.masked) args.token_mask = side.in(in.mask);
  if (c.desc.selection == MOEC_SELECT_TABLE) {
    args.table = side.in(in.table);
    args.token_ids = side.in(in.token_ids);
  }
  if (c.desc.selection == MOEC_SELECT_GIVEN) args.given_ids = side.in(in.given);
  args.expert_ids = side.out("expert_ids", MOEC_I32, {T, K});
  args.routing_weights = side.out("routing_weights", MOEC_F32, {T, K});
  if (in.scores) args.scores = side.out("scores", MOEC_F32, {T, N});
  if (in.counted) args.counts = side.out("counts", in.counts.dtype, {N}, {}, &in.counts);
  check(moec_route_forward(router.get(), &args, nullptr));

  auto grad = sized<moec_route_grad_args>();
  grad.flags = in.accumulate ? MOEC_GRAD_ACCUMULATE : 0;
  grad.logits = args.logits;
  grad.per_expert_scale = args.per_expert_scale;
  grad.expert_ids = args.expert_ids;
  grad.d_routing_weights = side.in(in.d_routing_weights);
  if (in.adds_loss) grad.d_logits_in = side.in(in.d_logits_in);
  grad.d_logits = side.out("d_logits", MOEC_F32, {T, N});
  if (c.desc.flags & MOEC_ROUTER_PER_EXPERT_SCALE)
    grad.d_per_expert_scale = side.out("d_scale", in.d_scale.dtype, {N}, {}, &in.d_scale);
  check(moec_route_backward(router.get(), &grad, nullptr));

  const moec_tensor bias = side.out("bias", MOEC_F32, {N}, {}, &in.select_bias);
  const moec_tensor counts = side.in(in.counts);
  check(moec_router_bias_update(router.get(), &counts, 0.001f, &bias, nullptr));
  return side.results();
}

struct GateCase {
  moec_router_desc desc;
  int64_t tokens, hidden, ids;
  moec_dtype x, weight, parameter, d_x;
  bool jittered_out, accumulate, accumulate_x, idle;
};

GateCase draw_gate(TensorDraw& draw) {
  GateCase c = {};
  moec_router_desc& desc = c.desc = sized<moec_router_desc>();
  desc.num_experts = draw.one_of({1, 8, 60, 64, 128, 256, 384});
  desc.num_zero_experts = draw.chance(0.2) ? 8 : 0;
  desc.top_k = 1;
  c.ids = desc.num_experts + desc.num_zero_experts;
  c.tokens = draw.one_of<int64_t>({0, 1, 3, 16, 77, 300});
  c.hidden = draw.one_of<int64_t>({1, 31, 64, 264, 1000, 2048});
  c.x = draw.real();
  c.weight = draw.chance(0.5) ? c.x : draw.real();
  c.parameter = draw.chance(0.5) ? c.weight : moec_dtype(MOEC_F32);
  c.d_x = draw.chance(0.5) ? c.x : moec_dtype(MOEC_F32);
  if (draw.chance(0.4)) desc.input = MOEC_INPUT_RMS_SCALED;
  if (draw.chance(0.4)) desc.jitter = 0.1f;
  if (draw.chance(0.5)) desc.flags |= MOEC_ROUTER_LOGIT_BIAS;
  desc.logit_precision = uint32_t(draw.below(2));
  desc.data_dtype = draw.real();
  desc.seed = uint64_t(draw.below(1 << 30)) << 20;
  c.jittered_out = desc.jitter != 0 && draw.chance(0.5);
  c.accumulate = draw.chance(0.5);
  c.accumulate_x = draw.chance(0.5);
  c.idle = draw.chance(0.4);
  return c;
}

Bound bound_of(moec_dtype dtype) {
  return {dtype == MOEC_F32 ? 1e-4 : dtype == MOEC_F16 ? 1.5e-3 : 1e-2};
}

std::vector<Result> gate(Side& side, const GateCase& c, TensorDraw draw) {
  const int64_t T = c.tokens, H = c.hidden, N = c.ids;
  const bool scaled = c.desc.input == MOEC_INPUT_RMS_SCALED;
  const bool biased = c.desc.flags & MOEC_ROUTER_LOGIT_BIAS;
  const auto router = make<Router>(moec_router_create, side.context(), &c.desc);
  auto args = sized<moec_gate_args>();
  args.rng_offset = 12345;
  const Values x = draw.normals(c.x, {T, H}, 1.0);
  args.x = side.in(x);
  args.weight = side.in(draw.normals(c.weight, {N, H}, 0.05));
  const Values bias = draw.normals(c.parameter, {N}, 0.1);
  const Values scale = draw.normals(c.parameter, {H}, 1.0);
  if (biased) args.bias = side.in(bias);
  if (scaled) args.input_scale = side.in(scale);
  const bool rounds = c.desc.logit_precision == MOEC_PREC_DATA;
  // where x is rounded again (a copy in its own type), one ulp of it may flip
  args.logits = side.out("logits", MOEC_F32, {T, N},
                         bound_of(rounds ? c.desc.data_dtype : moec_dtype(MOEC_F32)));
  if (c.jittered_out) args.x_jittered = side.out("x_jittered", c.x, {T, H});
  check(moec_gate_forward(router.get(), &args, nullptr));

  auto grad = sized<moec_gate_grad_args>();
  grad.flags = (c.accumulate ? uint32_t(MOEC_GRAD_ACCUMULATE) : 0u) |
               (c.accumulate_x ? uint32_t(MOEC_GRAD_ACCUMULATE_X) : 0u);
  grad.rng_offset = args.rng_offset;
  grad.x = args.x;
  grad.weight = args.weight;
  grad.input_scale = args.input_scale;
  Values d_logits = draw.normals(MOEC_F32, {T, N}, 1.0);
  if (c.idle) {  // every other token takes no part; its x is not read again
    grad.flags |= MOEC_GRAD_SKIP_IDLE;
    Values spoiled = x;
    for (int64_t t = 0; t < T; t += 2) {
      std::fill_n(d_logits.of.begin() + t * N, N, 0.0);
      spoiled.of[t * H + t % H] = t % 4 == 0 ? double(NAN) : double(INFINITY);
    }
    grad.x = side.in(spoiled);
  }
  grad.d_logits = side.in(d_logits);
  const Values d_x = draw.normals(c.d_x, {T, H}, 1.0), d_weight = draw.normals(c.weight, {N, H}, 1);
  const Values d_jittered = draw.normals(c.d_x, {T, H}, 1.0);
  grad.d_x = side.out("d_x", c.d_x, {T, H}, bound_of(c.d_x), &d_x);
  grad.d_weight = side.out("d_weight", c.weight, {N, H}, bound_of(c.weight), &d_weight);
  if (biased) grad.d_bias = side.out("d_bias", c.parameter, {N}, {}, &bias);
  if (scaled)
    grad.d_input_scale = side.out("d_input_scale", c.parameter, {H}, bound_of(c.parameter), &scale);
  if (c.desc.jitter != 0) grad.d_x_jittered = side.in(d_jittered);
  check(moec_gate_backward(router.get(), &grad, nullptr));
  return side.results();
}

class Routers : public Agree {};
INSTANTIATE_TEST_SUITE_P(Drawn, Routers, testing::Range(0, agree_cases(300)));

TEST_P(Routers, agree) {
  TensorDraw draw(number());
  const RouterCase c = draw_router(draw);
  const RouterInputs in = draw_inputs(draw, c);
  expect_same(c.name, [&](Side& side) { return route(side, c, in); });
}

// Gates run cuBLASLt's own kernels. racecheck reports them, and initcheck does not follow the bulk
// tensor stores that some of them have.
class Gates : public Agree {
 protected:
  void SetUp() override {
    if (is_under("racecheck") || is_under("initcheck")) GTEST_SKIP() << "misreads cuBLASLt";
  }
};
INSTANTIATE_TEST_SUITE_P(Drawn, Gates, testing::Range(0, agree_cases(60)));

TEST_P(Gates, agree) {
  TensorDraw draw(number());
  const GateCase c = draw_gate(draw);
  char name[160];
  std::snprintf(name, sizeof name, "gate T=%d H=%d N=%d x %x weight %x input %u jitter %g",
                int(c.tokens), int(c.hidden), int(c.ids), c.x, c.weight, c.desc.input,
                double(c.desc.jitter));
  expect_same(name, [&](Side& side) { return gate(side, c, draw); });
}

}  // namespace
}  // namespace moec::test
