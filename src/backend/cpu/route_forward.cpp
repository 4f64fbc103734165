// SPDX-License-Identifier: Apache-2.0
// Logits -> expert ids and routing weights, token by token.
#include <limits>
#include <utility>

#include "backend/cpu/ops.h"
#include "backend/cpu/route_row.h"
#include "backend/cpu/vectorised.h"

namespace moec::cpu {
namespace {

// Ids of a selection that looks at the scores.
void select_by_score(const RouteArgs& args, const RouteRow& row, int32_t* ids) {
  const moec_router_desc& desc = *args.desc;
  rank_row(row.s, args.select_bias, row.columns, row.keys);
  if (desc.selection == MOEC_SELECT_GROUP_TOPK)
    limit_groups(desc, row.columns, row.keys, row.group_keys);
  take_best(row.keys, row.lanes, desc.top_k, row.best, ids);
}

// Ids that are there already; the slots stay where they are.
void take_given(const RouteArgs& args, int64_t t, int64_t columns, int32_t* ids) {
  const int64_t top_k = args.desc->top_k;
  if (args.desc->selection == MOEC_SELECT_ROUND_ROBIN) {
    const IdRule rule{1, 0, args.desc->num_experts};
    for (int64_t k = 0; k < top_k; ++k) ids[k] = rule.id(t * top_k + k);
    return;
  }
  const bool table = args.desc->selection == MOEC_SELECT_TABLE;
  const Array& source = table ? args.table : args.given_ids;
  const int64_t line = table ? load_id(args.token_ids, t) : t;
  const bool exists = !table || (line >= 0 && line < args.table_rows);
  for (int64_t k = 0; k < top_k; ++k)
    ids[k] = exists ? math::valid_id(load_id(source, line * top_k + k), columns) : -1;
}

// PhiMoE's evaluation rule: two steps, each with the softmax of its own neighbourhood.
void select_mixer(const moec_router_desc& desc, const RouteRow& row, int32_t* ids, float* w) {
  const MixerStep first = mixer_step(desc.mixer_eps, row.z, row.columns, -1, row.s);
  const MixerStep second = mixer_step(desc.mixer_eps, row.z, row.columns, first.id, row.s);
  ids[0] = first.id, w[0] = first.weight;
  ids[1] = second.id, w[1] = second.weight;
  if (desc.slot_order == MOEC_SLOT_BY_EXPERT && math::later(ids[0], ids[1])) {
    std::swap(ids[0], ids[1]);
    std::swap(w[0], w[1]);
  }
}

void route_token(const RouteArgs& args, const RouteRow& row, int64_t t) {
  const moec_router_desc& desc = *args.desc;
  const int32_t top_k = desc.top_k;
  int32_t* const ids = args.expert_ids + t * top_k;
  float* const w = args.routing_weights + t * top_k;
  load_capped_row(desc, args.logits, t, row);
  const bool chooses = score_row(desc.score, row.z, row.lanes, row.s);
  RoundTo(desc, desc.score_precision).row(row.s, row.columns);
  if (args.scores)
    std::memcpy(args.scores + t * row.columns, row.s, size_t(row.columns) * sizeof *row.s);

  if (args.token_mask && !args.token_mask[t]) {
    std::fill_n(ids, top_k, -1);
    std::fill_n(w, top_k, 0.0f);
    return;
  }
  if (desc.selection == MOEC_SELECT_SPARSE_MIXER) {
    select_mixer(desc, row, ids, w);
  } else {
    const float* bias = nullptr;
    if (math::has_given_ids(desc.selection)) {
      take_given(args, t, row.columns, ids);
    } else if (chooses) {
      bias = args.select_bias;
      select_by_score(args, row, ids);
      if (desc.slot_order == MOEC_SLOT_BY_EXPERT) math::sort_by_expert(ids, top_k);
    } else {
      std::fill_n(ids, top_k, -1);
    }
    math::raw_weights(math::SerialSlots{top_k}, desc, row.s, row.z, bias, ids, w);
  }
  math::finish_weights(math::SerialSlots{top_k}, desc, args.per_expert_scale.data,
                       args.per_expert_scale.dtype, ids, w);
}

void route_tokens(const RouteArgs* args, const RouteRow* row, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) route_token(*args, *row, t);
}

template <class Count>
void count_ids(const RouteArgs& args, Count* counts) {
  const int64_t assignments = args.num_tokens * args.desc->top_k;
  for (int64_t a = 0; a < assignments; ++a)
    if (const int32_t id = args.expert_ids[a]; id >= 0)
      counts[id] += counts[id] < std::numeric_limits<Count>::max();
}

}  // namespace

void route_forward(const Device& device, const RouteArgs& args) {
  const Chunks chunks(args.num_tokens, kRouteTokens);
  const RouteRows rows(device, *args.desc);
  device.pool.parallel_for(chunks.count, [&](int32_t slot, int64_t chunk) {
    RowMemory memory;
    const RouteRow row = rows.row(slot, memory);
    vectorised<route_tokens>(&args, &row, chunks.begin(chunk), chunks.end(chunk));
  });
  if (!args.counts) return;
  if (args.counts.dtype == MOEC_I64)
    count_ids(args, static_cast<int64_t*>(args.counts.data));
  else
    count_ids(args, static_cast<int32_t*>(args.counts.data));
}

void bias_update(const Device&, const BiasUpdateArgs& args) {
  const auto count = [&](int32_t e) { return load_id(args.counts, e); };
  int64_t total = 0;
  for (int32_t e = 0; e < args.num_ids; ++e) total += count(e);
  for (int32_t e = 0; e < args.num_ids; ++e)
    args.bias[e] += args.rate * math::balance_direction(total, count(e), args.num_ids);
}

}  // namespace moec::cpu
