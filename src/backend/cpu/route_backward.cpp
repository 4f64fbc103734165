// SPDX-License-Identifier: Apache-2.0
// d(routing weights) -> d(logits), token by token. Everything is computed again from the logits and
// the chosen ids. Roundings count as the identity.
#include "backend/cpu/ops.h"
#include "backend/cpu/route_row.h"
#include "backend/cpu/vectorised.h"

namespace moec::cpu {
namespace {

bool is_mixer(const moec_router_desc& desc) {
  return desc.selection == MOEC_SELECT_SPARSE_MIXER;
}

// row.d += gradient through both steps of the sparse mixer; row.d_w: at their softmax weights.
void mixer_gradient(const moec_router_desc& desc, const RouteRow& row, int32_t first) {
  for (int32_t k = 0; k < desc.top_k; ++k) {
    const int32_t id = row.ids[k];
    if (id < 0) continue;
    mixer_step(desc.mixer_eps, row.z, row.columns, id == first ? -1 : first, row.s);
    const float dot = row.d_w[k] * row.w[k];
    for (int64_t i = 0; i < row.columns; ++i)
      row.d[i] += math::softmax_gradient(row.s[i], i == id ? row.d_w[k] : 0.0f, dot);
  }
}

// row.w: the mixer's weight of each slot. Returns the id of the first step.
int32_t mixer_weights(const moec_router_desc& desc, const RouteRow& row) {
  const MixerStep first = mixer_step(desc.mixer_eps, row.z, row.columns, -1, row.s);
  const MixerStep second = mixer_step(desc.mixer_eps, row.z, row.columns, first.id, row.s);
  for (int32_t k = 0; k < desc.top_k; ++k)
    row.w[k] = row.ids[k] < 0 ? 0.0f : row.ids[k] == first.id ? first.weight : second.weight;
  return first.id;
}

// row.d += gradient at the capped logits, from row.d_w at the scores of the slots.
void score_gradient(const moec_router_desc& desc, const RouteRow& row, bool is_scale_free) {
  if (!math::score_is_over_row(desc.score)) {
    for (int32_t k = 0; k < desc.top_k; ++k) {
      const int32_t id = row.ids[k];
      if (id >= 0) row.d[id] += row.d_w[k] * math::score_slope(desc.score, row.z[id], row.s[id]);
    }
    return;
  }
  float dot = 0.0f;
  for (int32_t k = 0; k < desc.top_k; ++k) {
    if (row.ids[k] < 0) continue;
    row.d[row.ids[k]] += row.d_w[k];
    dot += row.d_w[k] * row.w[k];
  }
  // Weights that a common factor does not change (Euler): the dot product is 0, so give exactly 0
  // to the experts that were not selected.
  if (is_scale_free) dot = 0.0f;
  for (int64_t i = 0; i < row.columns; ++i)
    row.d[i] = math::softmax_gradient(row.s[i], row.d[i], dot);
}

// row.d = gradient at the capped logits of a token with at least one expert; d_scale [C], may be
// null: += gradient of the per-expert scale.
void token_gradient(const RouteGradArgs& args, const RouteRow& row, const float* d_routing_weights,
                    float* d_scale) {
  const moec_router_desc& desc = *args.desc;
  const math::SerialSlots slots{desc.top_k};
  int32_t mixer_first = -1;
  if (is_mixer(desc)) {
    mixer_first = mixer_weights(desc, row);
  } else {
    score_row(desc.score, row.z, row.lanes, row.s);
    RoundTo(desc, desc.score_precision).row(row.s, row.columns);
    math::raw_weights(slots, desc, row.s, row.z, nullptr, row.ids, row.w);
  }
  const Array& scale = args.per_expert_scale;
  const bool is_scale_free =
      math::finish_gradient(slots, desc, scale.data, scale.dtype, row.ids, row.w, d_routing_weights,
                            row.d_w, [=](int32_t k, float d) {
                              if (d_scale) d_scale[row.ids[k]] += d;
                            });
  if (is_mixer(desc)) return mixer_gradient(desc, row, mixer_first);
  if (desc.weight_rule == MOEC_WEIGHT_SCORE) return score_gradient(desc, row, is_scale_free);
  math::weight_rule_gradient(slots, desc, row.w, row.d_w);
  for (int32_t k = 0; k < desc.top_k; ++k)
    if (row.ids[k] >= 0) row.d[row.ids[k]] += row.d_w[k];
}

void route_token_backward(const RouteGradArgs& args, const RouteRow& row, float* d_scale,
                          int64_t t) {
  const moec_router_desc& desc = *args.desc;
  const int64_t columns = row.columns, top_k = desc.top_k;
  bool is_routed = false;
  for (int64_t k = 0; k < top_k; ++k) {
    row.ids[k] = math::valid_id(load_id(args.expert_ids, t * top_k + k), columns);
    is_routed |= row.ids[k] >= 0;
  }
  std::memset(row.d, 0, size_t(row.lanes) * sizeof *row.d);
  if (is_routed) {
    load_capped_row(desc, args.logits, t, row);
    token_gradient(args, row, args.d_routing_weights + t * top_k, d_scale);
    if (desc.logit_softcap != 0.0f)
      for (int64_t i = 0; i < columns; ++i)
        row.d[i] *= math::softcap_slope(row.z[i], desc.logit_softcap);
  }
  float* const out = args.d_logits + t * columns;
  const float* const in = args.d_logits_in ? args.d_logits_in + t * columns : nullptr;
  for (int64_t i = 0; i < columns; ++i) out[i] = in ? in[i] + row.d[i] : row.d[i];
}

void route_tokens_backward(const RouteGradArgs* args, const RouteRow* row, float* d_scale,
                           int64_t begin, int64_t end) {
  if (d_scale) std::memset(d_scale, 0, size_t(row->columns) * sizeof *d_scale);
  for (int64_t t = begin; t < end; ++t) route_token_backward(*args, *row, d_scale, t);
}

}  // namespace

void route_backward(const Device& device, const RouteGradArgs& args) {
  const Chunks chunks(args.num_tokens, kRouteTokens);
  const RouteRows rows(device, *args.desc);
  const int64_t columns = rows.columns();
  const Array& d_scale = args.d_per_expert_scale;
  const Scratch scratch(device, d_scale ? uint64_t(chunks.count * columns) * sizeof(float) : 0);
  float* const partial = static_cast<float*>(scratch.data());
  device.pool.parallel_for(chunks.count, [&](int32_t slot, int64_t chunk) {
    RowMemory memory;
    const RouteRow row = rows.row(slot, memory);
    vectorised<route_tokens_backward>(&args, &row, partial ? partial + chunk * columns : nullptr,
                                      chunks.begin(chunk), chunks.end(chunk));
  });
  if (d_scale) store_sum(partial, chunks.count, columns, d_scale, args.accumulate);
}

}  // namespace moec::cpu
