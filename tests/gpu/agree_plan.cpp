// SPDX-License-Identifier: Apache-2.0
// Random plans from ids, maps, logits and scores, and the rows moved by them: every array bit for
// bit.
#include <algorithm>

#include "gpu/agree.h"

namespace moec::test {
namespace {

enum class Source { kIds, kMap, kLogits };

struct PlanCase {
  moec_plan_desc desc;
  int64_t tokens;
  Source source;
  Values ids, weights, map, probs, logits;
  bool weighted;
  std::string name;
};

void draw_local(TensorDraw& draw, moec_plan_desc& desc) {
  if (!draw.chance(0.3)) return;
  desc.expert_begin = int32_t(draw.below(desc.num_experts));
  desc.expert_end =
      desc.expert_begin + 1 + int32_t(draw.below(desc.num_experts - desc.expert_begin));
}

// Ids of one case: even, skewed to one expert, or all there; some are nobody's.
Values draw_ids(TensorDraw& draw, const moec_plan_desc& desc, int64_t tokens) {
  const int64_t ids = desc.num_experts + desc.num_zero_experts;
  const double skew = draw.one_of({0.0, 0.0, 0.5, 1.0});
  const int64_t favourite = draw.below(ids);
  Values values = draw.integers(draw.one_of<moec_dtype>({MOEC_I32, MOEC_I64}), {tokens, desc.top_k},
                                -1, ids + 1);
  for (int64_t i = 0; i < tokens * desc.top_k; ++i)
    if (draw.chance(skew)) values.of[i] = double(favourite);
  return values;
}

// At most K routed experts a token.
Values draw_map(TensorDraw& draw, const moec_plan_desc& desc, int64_t tokens) {
  Values map = draw.integers(draw.one_of<moec_dtype>({MOEC_U8, MOEC_BOOL, MOEC_I32}),
                             {tokens, desc.num_experts}, 0, 1);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t k = draw.below(desc.top_k + 1); k > 0; --k)
      map.of[t * desc.num_experts + draw.below(desc.num_experts)] = 1;
  return map;
}

PlanCase draw_plan(TensorDraw& draw, int64_t most_tokens) {
  PlanCase c = {};
  moec_plan_desc& desc = c.desc = sized<moec_plan_desc>();
  desc.num_experts = draw.one_of({1, 2, 8, 33, 60, 128, 256, 512, 1024, 1030, 2500});
  desc.num_zero_experts = draw.chance(0.3) ? 1 + int32_t(draw.below(9)) : 0;
  const int64_t ids = desc.num_experts + desc.num_zero_experts;
  desc.top_k = 1 + int32_t(draw.below(std::min<int64_t>(ids, 9)));
  draw_local(draw, desc);
  desc.align = draw.one_of({0, 1, 1, 2, 16, 64});
  c.tokens = draw.one_of<int64_t>({0, 1, 2, 31, 100, 129, 500, 1024, 1025, 3000});
  c.tokens = std::min(c.tokens, most_tokens);
  desc.max_tokens = c.tokens + draw.below(3);
  desc.drop = uint32_t(draw.below(3));
  if (desc.drop != MOEC_DROP_NONE) {
    if (draw.chance(0.5))
      desc.capacity = 1 + draw.below(1 + 2 * c.tokens * desc.top_k / desc.num_experts + 3);
    else
      desc.capacity_factor = draw.one_of({0.3f, 1.0f, 1.5f});
  }
  c.source = draw.one_of({Source::kIds, Source::kIds, Source::kMap, Source::kLogits});
  c.weighted = draw.chance(0.7);
  c.ids = draw_ids(draw, desc, c.tokens);
  c.weights = draw.normals(MOEC_F32, {c.tokens, desc.top_k}, 1.0, draw.chance(0.5) ? 0.25 : 0);
  for (double& weight : c.weights.of)
    if (draw.chance(0.02)) weight = draw.one_of<double>({NAN, -double(NAN), INFINITY, -INFINITY});
  c.map = draw_map(draw, desc, c.tokens);
  c.probs = draw.normals(MOEC_F32, {c.tokens, desc.num_experts}, 1.0, 0.25);
  c.logits = draw.normals(MOEC_F32, {c.tokens, ids}, 1.0, 0.25);
  for (double& value : c.probs.of)
    if (draw.chance(0.01)) value = double(NAN);
  for (double& value : c.logits.of)
    if (draw.chance(1e-4)) value = draw.one_of<double>({NAN, INFINITY});
  char name[160];
  std::snprintf(name, sizeof name, "plan T=%d E=%d Z=%d K=%d [%d,%d) align %d drop %u source %d",
                int(c.tokens), desc.num_experts, desc.num_zero_experts, desc.top_k,
                desc.expert_begin, desc.expert_end, desc.align, desc.drop, int(c.source));
  c.name = name;
  return c;
}

PlanHandle empty_plan(const Side& side, const moec_plan_desc& desc) {
  const moec_buffer* const own = nullptr;
  return make<PlanHandle>(moec_plan_create, side.context(), &desc, own);
}

PlanHandle build(Side& side, const PlanCase& c) {
  PlanHandle plan = empty_plan(side, c.desc);
  if (c.source == Source::kMap) {
    const moec_tensor map = side.in(c.map), probs = side.in(c.probs);
    check(moec_plan_from_map(plan.get(), &map, c.weighted ? &probs : nullptr, nullptr));
  } else if (c.source == Source::kIds) {
    const moec_tensor ids = side.in(c.ids), weights = side.in(c.weights);
    check(moec_plan_from_topk(plan.get(), &ids, c.weighted ? &weights : nullptr, nullptr));
  } else {
    auto desc = sized<moec_router_desc>();
    desc.num_experts = c.desc.num_experts;
    desc.num_zero_experts = c.desc.num_zero_experts;
    desc.top_k = c.desc.top_k;
    const auto router = make<Router>(moec_router_create, side.context(), &desc);
    auto args = sized<moec_route_args>();
    args.logits = side.in(c.logits);
    args.expert_ids = side.out("expert_ids", MOEC_I32, {c.tokens, c.desc.top_k});
    check(moec_plan_from_logits(plan.get(), router.get(), &args, nullptr));
  }
  return plan;
}

void record_plan(Side& side, const moec_plan* plan, const moec_plan_desc& desc) {
  const bool choice = desc.kind == MOEC_PLAN_EXPERT_CHOICE;
  for (int32_t field = 0; field <= MOEC_PLAN_TOKEN_ROWS; ++field) {
    if (choice ? field >= MOEC_PLAN_ASSIGNMENT_ROW && field <= MOEC_PLAN_ROUTING_WEIGHTS
               : field >= MOEC_PLAN_TOKEN_OFFSETS)
      continue;
    moec_tensor view;
    check(moec_plan_view(plan, field, &view));
    side.record("field " + std::to_string(field), view);
  }
}

std::vector<Result> plan_arrays(Side& side, const PlanCase& c) {
  const PlanHandle plan = build(side, c);
  record_plan(side, plan.get(), c.desc);
  const int64_t T = c.tokens;
  if (c.desc.top_k <= c.desc.num_experts && c.source != Source::kIds) {
    const moec_tensor map = side.out("row id map", MOEC_I32, {T, 2 * c.desc.num_experts + 1});
    check(moec_plan_export(plan.get(), MOEC_PLAN_ROW_ID_MAP, &map, nullptr));
  }
  const moec_tensor index = side.out("index map", MOEC_I32, {c.desc.top_k * T});
  check(moec_plan_export(plan.get(), MOEC_PLAN_INDEX_MAP, &index, nullptr));
  return side.results();
}

PlanCase draw_choice(TensorDraw& draw) {
  PlanCase c = {};
  moec_plan_desc& desc = c.desc = sized<moec_plan_desc>();
  desc.kind = MOEC_PLAN_EXPERT_CHOICE;
  desc.num_experts = draw.one_of({1, 2, 8, 33, 64, 128, 300});
  draw_local(draw, desc);
  desc.align = draw.one_of({0, 1, 16});
  c.tokens = draw.one_of<int64_t>({0, 1, 31, 100, 700, 2000});
  desc.max_tokens = c.tokens;
  desc.capacity = 1 + draw.below(c.tokens + 3);
  c.logits = draw.normals(MOEC_F32, {c.tokens, desc.num_experts}, 1.0, draw.chance(0.5) ? 0.5 : 0);
  for (int64_t i = 0; draw.chance(0.5) && i < c.tokens; ++i)
    c.logits.of[draw.below(c.tokens * desc.num_experts)] =
        draw.one_of<double>({NAN, -double(NAN), INFINITY, -INFINITY, -0.0});
  c.map = draw.integers(MOEC_U8, {c.tokens}, 0, 2);
  c.weighted = draw.chance(0.4);
  char name[160];
  std::snprintf(name, sizeof name, "choice T=%d E=%d [%d,%d) align %d capacity %d", int(c.tokens),
                desc.num_experts, desc.expert_begin, desc.expert_end, desc.align,
                int(desc.capacity));
  c.name = name;
  return c;
}

PlanHandle build_choice(Side& side, const PlanCase& c) {
  PlanHandle plan = empty_plan(side, c.desc);
  const moec_tensor scores = side.in(c.logits), mask = side.in(c.map);
  check(moec_plan_from_scores(plan.get(), &scores, c.weighted ? &mask : nullptr, nullptr));
  return plan;
}

std::vector<Result> choice_arrays(Side& side, const PlanCase& c) {
  const PlanHandle plan = build_choice(side, c);
  record_plan(side, plan.get(), c.desc);
  return side.results();
}

constexpr int64_t kMostElements = int64_t(1) << 21;  // of the rows that are moved

std::vector<Result> move_rows(Side& side, const PlanCase& c, TensorDraw draw) {
  const bool choice = c.desc.kind == MOEC_PLAN_EXPERT_CHOICE;
  const PlanHandle plan = choice ? build_choice(side, c) : build(side, c);
  moec_tensor row_token;
  check(moec_plan_view(plan.get(), MOEC_PLAN_ROW_TOKEN, &row_token));
  const int64_t T = c.tokens, K = c.desc.top_k, align = std::max(c.desc.align, 1);
  const int64_t P = row_token.shape[0] + draw.below(3) * align;
  const int64_t most = std::max<int64_t>(1, kMostElements / std::max<int64_t>(P, 1));
  const int64_t H = std::min(draw.one_of<int64_t>({1, 7, 16, 31, 64, 264, 1000}), most);
  const int64_t S = 1 + draw.below(9);
  const moec_dtype any = draw.one_of<moec_dtype>({MOEC_F32, MOEC_BF16, MOEC_I8, MOEC_I32});
  const moec_dtype real = draw.real();
  const bool weighted = !choice && draw.chance(0.6);
  auto permute = sized<moec_permute_args>();
  permute.plan = plan.get();
  permute.x = side.in(draw.normals(any, {T, H}, 20.0));
  permute.rows = side.out("rows", any, {P, H});
  if (draw.chance(0.5)) {
    permute.x_scale = side.in(draw.normals(MOEC_F32, {T, S}, 1.0));
    permute.row_scale = side.out("row_scale", MOEC_F32, {P, S});
  }
  if (draw.chance(0.5)) permute.row_weight = side.out("row_weight", MOEC_F32, {P});
  check(moec_permute(side.context(), &permute, nullptr));

  auto unpermute = sized<moec_unpermute_args>();
  unpermute.plan = plan.get();
  unpermute.rows = side.in(draw.normals(real, {P, H}, 1.0));
  const Values weights = draw.normals(MOEC_F32, {T, K}, 1.0, 0.5);  // some are 0
  if (weighted) unpermute.routing_weights = side.in(weights);
  if (draw.chance(0.5)) unpermute.residual = side.in(draw.normals(real, {T, H}, 1.0));
  unpermute.y = side.out("y", real, {T, H});
  check(moec_unpermute(side.context(), &unpermute, nullptr));

  auto back = sized<moec_permute_grad_args>();
  back.plan = plan.get();
  back.d_rows = unpermute.rows;
  back.d_x = side.out("d_x", real, {T, H});
  if (!choice) {
    back.d_row_weight = side.in(draw.normals(MOEC_F32, {P}, 1.0));
    back.d_routing_weights = side.out("d_routing_weights of permute", MOEC_F32, {T, K});
  }
  check(moec_permute_backward(side.context(), &back, nullptr));

  auto grad = sized<moec_unpermute_grad_args>();
  grad.plan = plan.get();
  grad.d_y = side.in(draw.normals(real, {T, H}, 1.0));
  grad.routing_weights = unpermute.routing_weights;
  grad.d_rows = side.out("d_rows", real, {P, H});
  if (!choice) {
    grad.rows = unpermute.rows;
    grad.d_routing_weights = side.out("d_routing_weights", MOEC_F32, {T, K});
  }
  check(moec_unpermute_backward(side.context(), &grad, nullptr));
  return side.results();
}

class Plans : public Agree {};
INSTANTIATE_TEST_SUITE_P(Drawn, Plans, testing::Range(0, agree_cases(200)));

TEST_P(Plans, agree) {
  TensorDraw draw(number());
  const PlanCase c = draw_plan(draw, INT64_MAX);
  expect_same(c.name, [&](Side& side) { return plan_arrays(side, c); });
}

class ExpertChoice : public Agree {};
INSTANTIATE_TEST_SUITE_P(Drawn, ExpertChoice, testing::Range(0, agree_cases(60)));

TEST_P(ExpertChoice, agrees) {
  TensorDraw draw(number());
  const PlanCase c = draw_choice(draw);
  expect_same(c.name, [&](Side& side) { return choice_arrays(side, c); });
}

class MovedRows : public Agree {};
INSTANTIATE_TEST_SUITE_P(Drawn, MovedRows, testing::Range(0, agree_cases(150)));

TEST_P(MovedRows, agree) {
  TensorDraw draw(number());
  const PlanCase c = draw.chance(0.3) ? draw_choice(draw) : draw_plan(draw, 500);
  expect_same("rows of " + c.name, [&](Side& side) { return move_rows(side, c, draw); });
}

}  // namespace
}  // namespace moec::test
