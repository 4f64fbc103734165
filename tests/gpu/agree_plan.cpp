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

void draw_local(Draw& draw, moec_plan_desc& desc) {
  if (!draw.chance(0.3)) return;
  desc.expert_begin = int32_t(draw.below(desc.num_experts));
  desc.expert_end =
      desc.expert_begin + 1 + int32_t(draw.below(desc.num_experts - desc.expert_begin));
}

// Ids of one case: even, skewed to one expert, or all there; some are nobody's.
Values draw_ids(Draw& draw, const moec_plan_desc& desc, int64_t tokens) {
  const int64_t ids = desc.num_experts + desc.num_zero_experts;
  const double skew = draw.of({0.0, 0.0, 0.5, 1.0});
  const int64_t favourite = draw.below(ids);
  Values values =
      draw.integers(draw.of<moec_dtype>({MOEC_I32, MOEC_I64}), {tokens, desc.top_k}, -1, ids + 1);
  for (int64_t i = 0; i < tokens * desc.top_k; ++i)
    if (draw.chance(skew)) values.set(i, double(favourite));
  return values;
}

// At most K routed experts a token.
Values draw_map(Draw& draw, const moec_plan_desc& desc, int64_t tokens) {
  Values map = draw.integers(draw.of<moec_dtype>({MOEC_U8, MOEC_BOOL, MOEC_I32}),
                             {tokens, desc.num_experts}, 0, 1);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t k = draw.below(desc.top_k + 1); k > 0; --k)
      map.set(t * desc.num_experts + draw.below(desc.num_experts), 1);
  return map;
}

PlanCase draw_plan(Draw& draw, int64_t most_tokens) {
  PlanCase c = {};
  moec_plan_desc& desc = c.desc = sized<moec_plan_desc>();
  desc.num_experts = draw.of({1, 2, 8, 33, 60, 128, 256, 512, 1024, 1030, 2500});
  desc.num_zero_experts = draw.chance(0.3) ? 1 + int32_t(draw.below(9)) : 0;
  const int64_t ids = desc.num_experts + desc.num_zero_experts;
  desc.top_k = 1 + int32_t(draw.below(std::min<int64_t>(ids, 9)));
  draw_local(draw, desc);
  desc.align = draw.of({0, 1, 1, 2, 16, 64});
  c.tokens = draw.of<int64_t>({0, 1, 2, 31, 100, 129, 500, 1024, 1025, 3000});
  c.tokens = std::min(c.tokens, most_tokens);
  desc.max_tokens = c.tokens + draw.below(3);
  desc.drop = uint32_t(draw.below(3));
  if (desc.drop != MOEC_DROP_NONE) {
    if (draw.chance(0.5))
      desc.capacity = 1 + draw.below(1 + 2 * c.tokens * desc.top_k / desc.num_experts + 3);
    else
      desc.capacity_factor = draw.of({0.3f, 1.0f, 1.5f});
  }
  c.source = draw.of({Source::kIds, Source::kIds, Source::kMap, Source::kLogits});
  c.weighted = draw.chance(0.7);
  c.ids = draw_ids(draw, desc, c.tokens);
  c.weights = draw.normals(MOEC_F32, {c.tokens, desc.top_k}, 1.0, draw.chance(0.5) ? 0.25 : 0);
  c.map = draw_map(draw, desc, c.tokens);
  c.probs = draw.normals(MOEC_F32, {c.tokens, desc.num_experts}, 1.0, 0.25);
  c.logits = draw.normals(MOEC_F32, {c.tokens, ids}, 1.0, 0.25);
  char name[160];
  std::snprintf(name, sizeof name, "plan T=%d E=%d Z=%d K=%d [%d,%d) align %d drop %u source %d",
                int(c.tokens), desc.num_experts, desc.num_zero_experts, desc.top_k,
                desc.expert_begin, desc.expert_end, desc.align, desc.drop, int(c.source));
  c.name = name;
  return c;
}

moec_plan* build(Side& side, const PlanCase& c) {
  moec_plan* plan = nullptr;
  MOEC_CHECK_CALL(moec_plan_create(side.context(), &c.desc, nullptr, &plan));
  if (c.source == Source::kMap) {
    const moec_tensor map = side.in(c.map), probs = side.in(c.probs);
    MOEC_CHECK_CALL(moec_plan_from_map(plan, &map, c.weighted ? &probs : nullptr, nullptr));
  } else if (c.source == Source::kIds) {
    const moec_tensor ids = side.in(c.ids), weights = side.in(c.weights);
    MOEC_CHECK_CALL(moec_plan_from_topk(plan, &ids, c.weighted ? &weights : nullptr, nullptr));
  } else {
    auto desc = sized<moec_router_desc>();
    desc.num_experts = c.desc.num_experts;
    desc.num_zero_experts = c.desc.num_zero_experts;
    desc.top_k = c.desc.top_k;
    moec_router* router = nullptr;
    MOEC_CHECK_CALL(moec_router_create(side.context(), &desc, &router));
    auto args = sized<moec_route_args>();
    args.logits = side.in(c.logits);
    args.expert_ids = side.out("expert_ids", MOEC_I32, {c.tokens, c.desc.top_k});
    MOEC_CHECK_CALL(moec_plan_from_logits(plan, router, &args, nullptr));
    moec_router_free(router);
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
    MOEC_CHECK_CALL(moec_plan_view(plan, field, &view));
    side.record("field " + std::to_string(field), view);
  }
}

std::vector<Result> plan_arrays(Side& side, const PlanCase& c) {
  moec_plan* const plan = build(side, c);
  record_plan(side, plan, c.desc);
  const int64_t T = c.tokens;
  if (c.desc.top_k <= c.desc.num_experts && c.source != Source::kIds) {
    const moec_tensor map = side.out("row id map", MOEC_I32, {T, 2 * c.desc.num_experts + 1});
    MOEC_CHECK_CALL(moec_plan_export(plan, MOEC_PLAN_ROW_ID_MAP, &map, nullptr));
  }
  const moec_tensor index = side.out("index map", MOEC_I32, {c.desc.top_k * T});
  MOEC_CHECK_CALL(moec_plan_export(plan, MOEC_PLAN_INDEX_MAP, &index, nullptr));
  std::vector<Result> results = side.results();
  moec_plan_free(plan);
  return results;
}

PlanCase draw_choice(Draw& draw) {
  PlanCase c = {};
  moec_plan_desc& desc = c.desc = sized<moec_plan_desc>();
  desc.kind = MOEC_PLAN_EXPERT_CHOICE;
  desc.num_experts = draw.of({1, 2, 8, 33, 64, 128, 300});
  draw_local(draw, desc);
  desc.align = draw.of({0, 1, 16});
  c.tokens = draw.of<int64_t>({0, 1, 31, 100, 700, 2000});
  desc.max_tokens = c.tokens;
  desc.capacity = 1 + draw.below(c.tokens + 3);
  c.logits = draw.normals(MOEC_F32, {c.tokens, desc.num_experts}, 1.0, draw.chance(0.5) ? 0.5 : 0);
  for (int64_t i = 0; draw.chance(0.5) && i < c.tokens; ++i)
    c.logits.set(draw.below(c.tokens * desc.num_experts), draw.of<double>({NAN, -INFINITY, -0.0}));
  c.map = draw.integers(MOEC_U8, {c.tokens}, 0, 2);
  c.weighted = draw.chance(0.4);
  char name[160];
  std::snprintf(name, sizeof name, "choice T=%d E=%d [%d,%d) align %d capacity %d", int(c.tokens),
                desc.num_experts, desc.expert_begin, desc.expert_end, desc.align,
                int(desc.capacity));
  c.name = name;
  return c;
}

moec_plan* build_choice(Side& side, const PlanCase& c) {
  moec_plan* plan = nullptr;
  MOEC_CHECK_CALL(moec_plan_create(side.context(), &c.desc, nullptr, &plan));
  const moec_tensor scores = side.in(c.logits), mask = side.in(c.map);
  MOEC_CHECK_CALL(moec_plan_from_scores(plan, &scores, c.weighted ? &mask : nullptr, nullptr));
  return plan;
}

std::vector<Result> choice_arrays(Side& side, const PlanCase& c) {
  moec_plan* const plan = build_choice(side, c);
  record_plan(side, plan, c.desc);
  std::vector<Result> results = side.results();
  moec_plan_free(plan);
  return results;
}

constexpr int64_t kMostElements = int64_t(1) << 21;  // of the rows that are moved

std::vector<Result> move_rows(Side& side, const PlanCase& c, uint64_t seed) {
  Draw draw(seed);
  const bool choice = c.desc.kind == MOEC_PLAN_EXPERT_CHOICE;
  moec_plan* const plan = choice ? build_choice(side, c) : build(side, c);
  moec_tensor row_token;
  MOEC_CHECK_CALL(moec_plan_view(plan, MOEC_PLAN_ROW_TOKEN, &row_token));
  const int64_t T = c.tokens, K = c.desc.top_k, align = std::max(c.desc.align, 1);
  const int64_t P = row_token.shape[0] + draw.below(3) * align;
  const int64_t most = std::max<int64_t>(1, kMostElements / std::max<int64_t>(P, 1));
  const int64_t H = std::min(draw.of<int64_t>({1, 7, 16, 31, 64, 264, 1000}), most);
  const int64_t S = 1 + draw.below(9);
  const moec_dtype any = draw.of<moec_dtype>({MOEC_F32, MOEC_BF16, MOEC_I8, MOEC_I32});
  const moec_dtype real = draw.real();
  const bool weighted = !choice && draw.chance(0.6);
  auto permute = sized<moec_permute_args>();
  permute.plan = plan;
  permute.x = side.in(draw.normals(any, {T, H}, 20.0));
  permute.rows = side.out("rows", any, {P, H});
  if (draw.chance(0.5)) {
    permute.x_scale = side.in(draw.normals(MOEC_F32, {T, S}, 1.0));
    permute.row_scale = side.out("row_scale", MOEC_F32, {P, S});
  }
  if (draw.chance(0.5)) permute.row_weight = side.out("row_weight", MOEC_F32, {P});
  MOEC_CHECK_CALL(moec_permute(side.context(), &permute, nullptr));

  auto unpermute = sized<moec_unpermute_args>();
  unpermute.plan = plan;
  unpermute.rows = side.in(draw.normals(real, {P, H}, 1.0));
  const Values weights = draw.normals(MOEC_F32, {T, K}, 1.0, 0.5);  // some are 0
  if (weighted) unpermute.routing_weights = side.in(weights);
  if (draw.chance(0.5)) unpermute.residual = side.in(draw.normals(real, {T, H}, 1.0));
  unpermute.y = side.out("y", real, {T, H});
  MOEC_CHECK_CALL(moec_unpermute(side.context(), &unpermute, nullptr));

  auto back = sized<moec_permute_grad_args>();
  back.plan = plan;
  back.d_rows = unpermute.rows;
  back.d_x = side.out("d_x", real, {T, H});
  if (!choice) {
    back.d_row_weight = side.in(draw.normals(MOEC_F32, {P}, 1.0));
    back.d_routing_weights = side.out("d_routing_weights of permute", MOEC_F32, {T, K});
  }
  MOEC_CHECK_CALL(moec_permute_backward(side.context(), &back, nullptr));

  auto grad = sized<moec_unpermute_grad_args>();
  grad.plan = plan;
  grad.d_y = side.in(draw.normals(real, {T, H}, 1.0));
  grad.routing_weights = unpermute.routing_weights;
  grad.d_rows = side.out("d_rows", real, {P, H});
  if (!choice) {
    grad.rows = unpermute.rows;
    grad.d_routing_weights = side.out("d_routing_weights", MOEC_F32, {T, K});
  }
  MOEC_CHECK_CALL(moec_unpermute_backward(side.context(), &grad, nullptr));
  std::vector<Result> results = side.results();
  moec_plan_free(plan);
  return results;
}

}  // namespace

int check_plans(Side& cpu, Side& gpu, uint64_t seed, int cases) {
  int bad = 0;
  for (int i = 0; i < cases; ++i) {
    Draw draw(seed + uint64_t(i));
    const PlanCase c = draw_plan(draw, INT64_MAX);
    bad += !agree(c.name, plan_arrays(cpu, c), plan_arrays(gpu, c));
  }
  return bad;
}

int check_choice_plans(Side& cpu, Side& gpu, uint64_t seed, int cases) {
  int bad = 0;
  for (int i = 0; i < cases; ++i) {
    Draw draw(seed + uint64_t(i));
    const PlanCase c = draw_choice(draw);
    bad += !agree(c.name, choice_arrays(cpu, c), choice_arrays(gpu, c));
  }
  return bad;
}

int check_rows(Side& cpu, Side& gpu, uint64_t seed, int cases) {
  int bad = 0;
  for (int i = 0; i < cases; ++i) {
    Draw draw(seed + uint64_t(i));
    const PlanCase c = draw.chance(0.3) ? draw_choice(draw) : draw_plan(draw, 500);
    bad += !agree("rows of " + c.name, move_rows(cpu, c, seed + uint64_t(i)),
                  move_rows(gpu, c, seed + uint64_t(i)));
  }
  return bad;
}

// With CHECK_INPUTS an id out of range is refused (CPU) or reported by the next wait (CUDA).
int check_wrong_ids(int32_t device) {
  Side side(device, MOEC_CONTEXT_CHECK_INPUTS);
  Draw draw(1);
  auto desc = sized<moec_plan_desc>();
  desc.max_tokens = 300;
  desc.num_experts = 8;
  desc.top_k = 2;
  moec_plan* plan = nullptr;
  MOEC_CHECK_CALL(moec_plan_create(side.context(), &desc, nullptr, &plan));
  Values values = draw.integers(MOEC_I32, {300, 2}, -1, 8);
  const moec_tensor right = side.in(values);
  values.set(401, 8);
  values.set(500, -2);
  const moec_tensor wrong = side.in(values);
  moec_status first = moec_plan_from_topk(plan, &right, nullptr, nullptr);
  if (first == MOEC_OK) first = moec_context_sync(side.context(), nullptr);
  moec_status second = moec_plan_from_topk(plan, &wrong, nullptr, nullptr);
  if (second == MOEC_OK) second = moec_context_sync(side.context(), nullptr);
  auto info = sized<moec_error_info>();
  moec_last_error(&info);
  const bool said = std::strstr(info.message, "expert_ids[200,1] is 8") != nullptr;
  const moec_status third = moec_context_sync(side.context(), nullptr);  // reported once
  const bool good = first == MOEC_OK && second == MOEC_E_INVALID_ARG && said && third == MOEC_OK;
  std::printf("%-4s wrong ids: %s, then %s (%s), then %s\n", good ? "ok" : "FAIL",
              moec_status_name(first), moec_status_name(second), info.message,
              moec_status_name(third));
  moec_plan_free(plan);
  return !good;
}

}  // namespace moec::test
