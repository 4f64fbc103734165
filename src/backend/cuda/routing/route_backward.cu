// SPDX-License-Identifier: Apache-2.0
// d(routing weights) -> d(logits): a warp a token. Everything is computed again from the logits
// and the chosen ids. Roundings count as the identity. What a slot adds to the gradient of its
// id's scale is kept [T,K] and summed by chunks of tokens, as the CPU backend does.
#include "backend/cuda/routing/column_sum.h"
#include "backend/cuda/routing/route.h"
#include "backend/cuda/routing/route_row.cuh"

namespace moec::cuda {
namespace {

constexpr int64_t kRouteTokens = 16;  // least number of tokens of a chunk

struct BackwardParams {
  moec_router_desc desc;  // args.desc is memory of the host
  RouteGradArgs args;
  RowPlaces places;
  float* slot_scale;  // [T,K] or null
};

__device__ bool is_mixer(const moec_router_desc& desc) {
  return desc.selection == MOEC_SELECT_SPARSE_MIXER;
}

// row.w: the mixer's weight of each slot. Returns the id of the first step.
__device__ int32_t mixer_weights(const moec_router_desc& desc, const RouteRow& row) {
  const MixerStep first = mixer_step(desc.mixer_eps, row, -1);
  __syncwarp();
  const MixerStep second = mixer_step(desc.mixer_eps, row, first.id);
  for_columns(row.top_k, [&](int k) {
    row.w[k] = row.ids[k] < 0 ? 0.0f : row.ids[k] == first.id ? first.weight : second.weight;
  });
  __syncwarp();
  return first.id;
}

// row.d += gradient through both steps of the sparse mixer; row.d_w: at their softmax weights.
__device__ void mixer_gradient(const moec_router_desc& desc, const RouteRow& row, int32_t first) {
  for (int k = 0; k < row.top_k; ++k) {
    const int32_t id = row.ids[k];
    if (id < 0) continue;
    mixer_step(desc.mixer_eps, row, id == first ? -1 : first);
    const float dot = row.d_w[k] * row.w[k];
    for_columns(row.columns, [&](int i) {
      row.d[i] += math::softmax_gradient(row.s[i], i == id ? row.d_w[k] : 0.0f, dot);
    });
    __syncwarp();
  }
}

// row.d += gradient at the capped logits, from row.d_w at the scores of the slots.
__device__ void score_gradient(const moec_router_desc& desc, const RouteRow& row, bool scale_free) {
  const bool over_row = math::score_is_over_row(desc.score);
  float dot = 0.0f;
  for (int k = 0; lane_id() == 0 && k < row.top_k; ++k) {
    const int32_t id = row.ids[k];
    if (id < 0) continue;
    row.d[id] +=
        over_row ? row.d_w[k] : row.d_w[k] * math::score_slope(desc.score, row.z[id], row.s[id]);
    dot += row.d_w[k] * row.w[k];
  }
  __syncwarp();
  if (!over_row) return;
  // Weights that a common factor does not change (Euler): the dot product is 0, so give exactly 0
  // to the experts that were not selected.
  dot = scale_free ? 0.0f : __shfl_sync(kAllLanes, dot, 0);
  for_columns(row.columns,
              [&](int i) { row.d[i] = math::softmax_gradient(row.s[i], row.d[i], dot); });
}

// row.d = gradient at the capped logits of a token with at least one expert.
__device__ void token_gradient(const BackwardParams& p, const RouteRow& row, int64_t t) {
  const moec_router_desc& desc = p.desc;
  const Array& scale = p.args.per_expert_scale;
  int32_t mixer_first = -1;
  if (is_mixer(desc))
    mixer_first = mixer_weights(desc, row);
  else
    rounded_scores(desc, row);
  __syncwarp();
  const WarpSlots slots{row.top_k};
  if (!is_mixer(desc)) math::raw_weights(slots, desc, row.s, row.z, nullptr, row.ids, row.w);
  float* const out = p.slot_scale ? p.slot_scale + t * row.top_k : nullptr;
  const bool scale_free = math::finish_gradient(slots, desc, scale.data, scale.dtype, row.ids,
                                                row.w, p.args.d_routing_weights + t * row.top_k,
                                                row.d_w, [=](int32_t k, float d) {
                                                  if (out) out[k] = d;
                                                });
  const bool from_logits = desc.weight_rule != MOEC_WEIGHT_SCORE && !is_mixer(desc);
  if (from_logits) math::weight_rule_gradient(slots, desc, row.w, row.d_w);
  __syncwarp();
  if (is_mixer(desc)) return mixer_gradient(desc, row, mixer_first);
  if (!from_logits) return score_gradient(desc, row, scale_free);
  for (int k = 0; lane_id() == 0 && k < row.top_k; ++k)
    if (row.ids[k] >= 0) row.d[row.ids[k]] += row.d_w[k];  // ids may repeat
}

__global__ void route_backward_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(16) char shared[];
  begin_kernel();
  const RouteRow row = p.places.row(shared);
  const Array& ids = p.args.expert_ids;
  for (int64_t t = p.places.first_row(); t < p.args.num_tokens; t += p.places.row_step()) {
    bool routed = false;
    for_columns(row.top_k, [&](int k) {
      row.ids[k] =
          math::valid_id(load_integer(ids.data, ids.dtype, t * row.top_k + k), row.columns);
      routed |= row.ids[k] >= 0;
    });
    for_columns(row.lanes, [&](int i) { row.d[i] = 0.0f; });
    if (__any_sync(kAllLanes, routed)) {
      load_capped_row(p.desc, p.args.logits, t, row);
      __syncwarp();
      token_gradient(p, row, t);
      __syncwarp();
      if (p.desc.logit_softcap != 0.0f)
        for_columns(row.columns, [&](int i) {
          row.d[i] *= math::softcap_slope(row.z[i], p.desc.logit_softcap);
        });
    }
    float* const out = p.args.d_logits + t * row.columns;
    const float* const in = p.args.d_logits_in ? p.args.d_logits_in + t * row.columns : nullptr;
    for_columns(row.columns, [&](int i) { out[i] = in ? in[i] + row.d[i] : row.d[i]; });
    __syncwarp();
  }
}

// partial[chunk, id] = sum of the chunk's slots with that id, in their order.
__global__ void sum_slots_kernel(const Array ids, const float* slots, int64_t num_tokens,
                                 int64_t chunk_tokens, int top_k, int columns, float* partial) {
  begin_kernel();
  const int id = int(global_thread());
  if (id >= columns) return;
  const int64_t first = blockIdx.y * chunk_tokens;
  const int64_t last = min(first + chunk_tokens, num_tokens);
  float sum = 0.0f;
  for (int64_t a = first * top_k; a < last * top_k; ++a)
    if (load_integer(ids.data, ids.dtype, a) == id) sum += slots[a];
  partial[blockIdx.y * int64_t(columns) + id] = sum;
}

}  // namespace

uint64_t scale_gradient_bytes(int64_t columns) {
  return uint64_t(Chunks::kMax * columns) * sizeof(float) + kCacheLine;
}

void route_backward(const Op& op, const RouteGradArgs& args) {
  static std::atomic<uint64_t> allowed;
  const int64_t columns = int64_t(args.desc->num_experts) + args.desc->num_zero_experts;
  const int64_t T = args.num_tokens, K = args.desc->top_k;
  const Array& d_scale = args.d_per_expert_scale;
  const Chunks chunks(T, kRouteTokens);
  const Scratch rows(op, RowPlaces::scratch_bytes(columns, K));
  const Scratch slots(op, d_scale ? uint64_t(T * K) * sizeof(float) : 0);
  const Scratch partial(op, d_scale ? uint64_t(chunks.count * columns) * sizeof(float) : 0);
  const RowPlaces places(columns, K, rows.as<char>());
  check(allow_shared_memory(route_backward_kernel, RowPlaces::kSharedBytes, allowed), "route");
  if (T > 0)
    run(op, "gradient of routing", route_backward_kernel, places.grid(T, op.multiprocessors),
        places.threads(), places.shared_bytes(),
        BackwardParams{*args.desc, args, places, slots.as<float>()});
  if (!d_scale) return;
  if (T > 0)
    run(op, "gradient of scales", sum_slots_kernel,
        dim3(unsigned((columns + 127) / 128), unsigned(chunks.count)), 128, 0, args.expert_ids,
        slots.as<const float>(), T, chunks.length, int(K), int(columns), partial.as<float>());
  store_sum(op, partial.as<const float>(), chunks.count, columns, d_scale, args.accumulate);
}

}  // namespace moec::cuda
