// SPDX-License-Identifier: Apache-2.0
// Plans, each array of them, and the rows that they move; auxiliary losses.
#include <algorithm>
#include <iterator>

#include "experts_case.h"

namespace moec::bits {
namespace {

constexpr int64_t kExperts = 9, kZero = 2, kTopK = 3;

enum class Source { kIds, kMap, kLogits, kScores };

struct PlanCase {
  const char* name;
  int32_t begin = 0, end = 0, align = 0;
  uint32_t drop = MOEC_DROP_NONE;
  int64_t capacity = 0;
  float factor = 0;
  Source source = Source::kIds;
  bool weighted = true;
};
constexpr PlanCase kPlans[] = {
    {.name = "plain"},
    {.name = "unweighted", .weighted = false},
    {.name = "align", .align = 8},
    {.name = "range", .begin = 2, .end = 7, .align = 4},
    {.name = "last_expert", .begin = 8, .end = 9},
    {.name = "by_position", .align = 4, .drop = MOEC_DROP_BY_POSITION, .capacity = 10},
    {.name = "by_weight", .drop = MOEC_DROP_BY_WEIGHT, .capacity = 7},
    {.name = "by_factor", .drop = MOEC_DROP_BY_POSITION, .factor = 0.5f},
    {.name = "map", .align = 2, .source = Source::kMap},
    {.name = "logits", .begin = 1, .end = 9, .source = Source::kLogits},
    {.name = "choice", .capacity = 11, .source = Source::kScores},
    {.name = "choice_range",
     .begin = 2,
     .end = 7,
     .align = 16,
     .capacity = 20,
     .source = Source::kScores},
};
constexpr int64_t kTokens[] = {1, 77, 1030};

class Built {
 public:
  Built(Case& c, const PlanCase& p, int64_t tokens) : c_(c), p_(p), tokens_(tokens) {
    const bool choice = p.source == Source::kScores;
    auto desc = sized<moec_plan_desc>();
    desc.max_tokens = tokens + 5;
    desc.num_experts = kExperts;
    desc.num_zero_experts = choice ? 0 : kZero;
    desc.top_k = choice ? 0 : kTopK;
    desc.kind = choice ? MOEC_PLAN_EXPERT_CHOICE : MOEC_PLAN_TOPK;
    desc.expert_begin = p.begin;
    desc.expert_end = p.end;
    desc.align = p.align;
    desc.drop = p.drop;
    desc.capacity = p.capacity;
    desc.capacity_factor = p.factor;
    uint64_t bytes = 0;
    int64_t max_rows = 0;
    require("plan_size", moec_plan_size(&desc, &bytes, &max_rows));
    c.number("max_rows", static_cast<uint64_t>(max_rows));
    const moec_buffer memory = c.workspace(bytes);
    plan_ = make<Plan>("plan_create", moec_plan_create, c.context(), &desc, &memory);
    build();
  }
  moec_plan* get() const { return plan_.get(); }

 private:
  void build() {
    switch (p_.source) {
      case Source::kIds:
        return from_ids();
      case Source::kMap:
        return from_map();
      case Source::kLogits:
        return from_logits();
      case Source::kScores:
        return from_scores();
    }
  }
  void from_ids() {
    const moec_tensor ids = c_.input_ids(MOEC_I64, {tokens_, kTopK}, -1, kExperts + kZero + 1);
    const moec_tensor weights = c_.input(MOEC_F32, {tokens_, kTopK}, {.step = 0.0625});
    require("plan_from_topk",
            moec_plan_from_topk(plan_.get(), &ids, p_.weighted ? &weights : nullptr, nullptr));
  }
  void from_map() {
    std::vector<int64_t> map(static_cast<size_t>(tokens_ * kExperts));
    const std::vector<int64_t> ids = draw_ids(c_.draw(), tokens_, kTopK, kExperts);
    for (size_t i = 0; i < ids.size(); ++i)
      map[static_cast<size_t>(static_cast<int64_t>(i) / kTopK * kExperts + ids[i])] = 1;
    const moec_tensor routed = c_.input_ids(MOEC_U8, {tokens_, kExperts}, map);
    const moec_tensor probabilities = c_.input(MOEC_F32, {tokens_, kExperts});
    require("plan_from_map", moec_plan_from_map(plan_.get(), &routed, &probabilities, nullptr));
  }
  void from_logits() {
    auto desc = sized<moec_router_desc>();
    desc.num_experts = kExperts;
    desc.num_zero_experts = kZero;
    desc.top_k = kTopK;
    const auto router = make<Router>("router_create", moec_router_create, c_.context(), &desc);
    auto args = sized<moec_route_args>();
    args.logits = c_.input(MOEC_F32, {tokens_, kExperts + kZero}, {.step = 0.125});
    args.expert_ids = c_.output("expert_ids", MOEC_I32, {tokens_, kTopK});
    require("plan_from_logits", moec_plan_from_logits(plan_.get(), router.get(), &args, nullptr));
    require("context_sync", moec_context_sync(c_.context(), nullptr));
  }
  void from_scores() {
    const moec_tensor scores = c_.input(MOEC_F32, {tokens_, kExperts}, {.step = 0.0625});
    const moec_tensor mask = c_.input_ids(MOEC_U8, {tokens_}, 0, 4);
    require("plan_from_scores", moec_plan_from_scores(plan_.get(), &scores, &mask, nullptr));
  }

  Case& c_;
  const PlanCase& p_;
  const int64_t tokens_;
  Plan plan_;
};

struct Exported {
  const char* name;
  moec_dtype dtype = MOEC_I32;
};
constexpr Exported kFields[] = {
    // by moec_plan_field
    {"counts"},        {"group_offsets"},        {"row_token"},
    {"row_slot"},      {"row_weight", MOEC_F32}, {"assignment_row"},
    {"expert_ids"},    {"weights", MOEC_F32},    {"totals"},
    {"token_offsets"}, {"token_rows"},
};

// A field that plans of this kind do not have is a refusal, which counts, too.
void export_fields(Case& c, const moec_plan* plan) {
  for (int32_t field = 0; field < static_cast<int32_t>(std::size(kFields)); ++field) {
    moec_tensor view;
    const moec_status status = moec_plan_view(plan, field, &view);
    if (status != MOEC_OK) {
      c.refused({kFields[field].name, status});
      continue;
    }
    const moec_tensor copy = c.output(kFields[field].name, kFields[field].dtype,
                                      Shape(view.shape, view.shape + view.ndim));
    require("plan_export", moec_plan_export(plan, field, &copy, nullptr));
  }
}

void export_maps(Case& c, const moec_plan* plan, const PlanCase& p, int64_t tokens) {
  if (p.source == Source::kScores) return;
  const moec_tensor index = c.output("index_map", MOEC_I32, {kTopK * tokens});
  require("plan_export", moec_plan_export(plan, MOEC_PLAN_INDEX_MAP, &index, nullptr));
  if (p.source == Source::kIds) return;  // an id may stand twice there
  const moec_tensor rows = c.output("row_id_map", MOEC_I32, {tokens, 2 * kExperts + 1});
  require("plan_export", moec_plan_export(plan, MOEC_PLAN_ROW_ID_MAP, &rows, nullptr));
}

void move_rows(Case& c, const moec_plan* plan, const PlanCase& p, int64_t tokens, moec_dtype type,
               int64_t hidden) {
  moec_tensor row_token;
  require("plan_view", moec_plan_view(plan, MOEC_PLAN_ROW_TOKEN, &row_token));
  const int64_t rows = row_token.shape[0] + 2 * std::max(p.align, 1);
  const bool topk = p.source != Source::kScores;
  const Shape of_rows = {rows, hidden}, of_tokens = {tokens, hidden}, of_slots = {tokens, kTopK};
  auto permute = sized<moec_permute_args>();
  permute.plan = plan;
  permute.x = c.input(type, of_tokens);
  permute.x_scale = c.input(MOEC_F32, {tokens, 4});
  permute.rows = c.output("rows", type, of_rows);
  permute.row_scale = c.output("row_scale", MOEC_F32, {rows, 4});
  permute.row_weight = c.output("permuted_weight", MOEC_F32, {rows});
  require("permute", moec_permute(c.context(), &permute, nullptr));

  auto unpermute = sized<moec_unpermute_args>();
  unpermute.plan = plan;
  unpermute.rows = c.input(type, of_rows);
  if (topk) unpermute.routing_weights = c.input(MOEC_F32, of_slots);
  unpermute.residual = c.input(type, of_tokens);
  unpermute.y = c.output("y", type, of_tokens);
  require("unpermute", moec_unpermute(c.context(), &unpermute, nullptr));

  auto permute_grad = sized<moec_permute_grad_args>();
  permute_grad.plan = plan;
  permute_grad.d_rows = c.input(type, of_rows);
  permute_grad.d_row_weight = c.input(MOEC_F32, {rows});
  permute_grad.d_x = c.output("d_x", type, of_tokens);
  if (topk) permute_grad.d_routing_weights = c.output("d_row_weights", MOEC_F32, of_slots);
  require("permute_backward", moec_permute_backward(c.context(), &permute_grad, nullptr));

  auto unpermute_grad = sized<moec_unpermute_grad_args>();
  unpermute_grad.plan = plan;
  unpermute_grad.d_y = c.input(type, of_tokens);
  unpermute_grad.rows = unpermute.rows;
  if (topk) unpermute_grad.routing_weights = unpermute.routing_weights;
  unpermute_grad.d_rows = c.output("d_rows", type, of_rows);
  if (topk) unpermute_grad.d_routing_weights = c.output("d_merging", MOEC_F32, of_slots);
  require("unpermute_backward", moec_unpermute_backward(c.context(), &unpermute_grad, nullptr));
}

struct LossCase {
  const char* name;
  uint32_t kind, score = MOEC_SCORE_SOFTMAX;
  bool masked = false, counted = false, scaled = false;
};
constexpr LossCase kLosses[] = {
    {"mixtral", MOEC_LOSS_BALANCE_MIXTRAL},
    {"mixtral_masked", MOEC_LOSS_BALANCE_MIXTRAL, MOEC_SCORE_SOFTMAX, true, false, true},
    {"switch", MOEC_LOSS_BALANCE_SWITCH},
    {"switch_sigmoid", MOEC_LOSS_BALANCE_SWITCH, MOEC_SCORE_SIGMOID, true, false, true},
    {"switch_softplus", MOEC_LOSS_BALANCE_SWITCH, MOEC_SCORE_SQRT_SOFTPLUS, false, true},
    {"sequence", MOEC_LOSS_BALANCE_SEQUENCE},
    {"sequence_sigmoid", MOEC_LOSS_BALANCE_SEQUENCE, MOEC_SCORE_SIGMOID, true, false, true},
    {"z", MOEC_LOSS_Z},
    {"z_masked", MOEC_LOSS_Z, MOEC_SCORE_SOFTMAX, true, false, true},
};

void run_loss(Case& c, const LossCase& loss, int64_t tokens, int64_t experts, moec_dtype type) {
  const int64_t layers = loss.kind == MOEC_LOSS_BALANCE_MIXTRAL ? 3 : 1;
  auto args = sized<moec_loss_args>();
  args.kind = loss.kind;
  args.top_k = 2;
  args.coefficient = 0.5f;
  args.seq_len = tokens / 6;
  args.score = loss.score;
  std::vector<moec_tensor> logits, d_logits;
  for (int64_t layer = 0; layer < layers; ++layer) {
    logits.push_back(c.input(type, {tokens, experts}, {.scale = 3, .step = 0.125}));
    d_logits.push_back(c.sum("d_logits_" + std::to_string(layer), MOEC_F32, {tokens, experts}));
  }
  args.logits = logits.data();
  args.d_logits = d_logits.data();
  args.count = layers;
  if (loss.counted) args.counts = c.input_ids(MOEC_I32, {experts}, 0, 50);
  if (loss.masked) args.token_mask = c.input_ids(MOEC_U8, {tokens}, 0, 2);
  args.loss = c.output("loss", MOEC_F32, {1});
  require("loss_forward", moec_loss_forward(c.context(), &args, nullptr));
  args.loss = {};
  if (loss.scaled) args.d_loss = c.input(MOEC_F32, {1});
  require("loss_backward", moec_loss_backward(c.context(), &args, nullptr));
  c.finish();
}

}  // namespace

void plan_cases(const moec_context* context) {
  for (const int64_t tokens : kTokens)
    for (const PlanCase& p : kPlans)
      for (const DtypeName& type : kReals)
        run_case(
            context, std::string("plan/") + std::to_string(tokens) + "/" + p.name + "/" + type.name,
            [&](Case& c) {
              const Built plan(c, p, tokens);
              if (type.dtype == MOEC_F32) {
                export_fields(c, plan.get());
                export_maps(c, plan.get(), p, tokens);
              }
              move_rows(c, plan.get(), p, tokens, type.dtype, type.dtype == MOEC_BF16 ? 264 : 77);
              c.finish();
            });
}

void loss_cases(const moec_context* context) {
  for (const DtypeName& type : kReals)
    for (const int64_t tokens : {6, 96, 1200})
      for (const LossCase& loss : kLosses)
        run_case(context,
                 std::string("loss/") + std::to_string(tokens) + "/" + type.name + "/" + loss.name,
                 [&](Case& c) { run_loss(c, loss, tokens, tokens == 96 ? 64 : 9, type.dtype); });
}

}  // namespace moec::bits
