// SPDX-License-Identifier: Apache-2.0
// Logits -> expert ids and routing weights: a warp a token; its lanes are the columns, then the
// slots.
#include <cub/block/block_reduce.cuh>

#include "backend/cuda/routing/route.h"
#include "backend/cuda/routing/route_row.cuh"

namespace moec::cuda {
namespace {

struct ForwardParams {
  moec_router_desc desc;  // args.desc is memory of the host
  RouteArgs args;
  RowPlaces places;
};

// R5: experts outside the best groups get the fill value. row.d: the groups' scores.
__device__ void limit_groups(const moec_router_desc& desc, const RouteRow& row) {
  const int size = row.columns / desc.num_groups;
  const int best = min(max(desc.group_top_m, 1), size);
  for (int g = 0; g < desc.num_groups; ++g) {
    int64_t below = INT64_MAX;
    float sum = 0.0f;
    for (int m = 0; m < best; ++m) {
      below = warp_max_key(lane_next_key(row.c, g * size, (g + 1) * size, below));
      sum += math::key_value(below);
    }
    if (lane_id() == 0) row.d[g] = sum;
  }
  __syncwarp();
  int64_t last = INT64_MAX;  // key of the worst group that is kept
  for (int i = 0; i < desc.top_groups; ++i)
    last = warp_max_key(lane_next_key(row.d, 0, desc.num_groups, last));
  const float fill = desc.group_fill == MOEC_FILL_ZERO ? 0.0f : -__builtin_inff();
  for_columns(row.columns, [&](int i) {
    const int g = i / size;
    if (math::rank_key(row.d[g], g) < last) row.c[i] = fill;
  });
  __syncwarp();
}

// R4..R6
__device__ void select_by_score(const ForwardParams& p, const RouteRow& row) {
  const float* const bias = p.args.select_bias;
  for_columns(row.columns, [&](int i) { row.c[i] = bias ? row.s[i] + bias[i] : row.s[i]; });
  __syncwarp();
  if (p.desc.selection == MOEC_SELECT_GROUP_TOPK) limit_groups(p.desc, row);
  take_best(row.c, row.columns, row.top_k, row.ids);
}

// Ids that are there already; the slots stay where they are.
__device__ void take_given(const ForwardParams& p, int64_t t, const RouteRow& row) {
  if (p.desc.selection == MOEC_SELECT_ROUND_ROBIN) {
    const IdRule rule{1, 0, p.desc.num_experts};
    for_columns(row.top_k, [&](int k) { row.ids[k] = rule.id(t * row.top_k + k); });
    __syncwarp();
    return;
  }
  const bool table = p.desc.selection == MOEC_SELECT_TABLE;
  const Array& source = table ? p.args.table : p.args.given_ids;
  const Array& tokens = p.args.token_ids;
  const int64_t line = table ? load_integer(tokens.data, tokens.dtype, t) : t;
  const bool exists = !table || (line >= 0 && line < p.args.table_rows);
  for_columns(row.top_k, [&](int k) {
    row.ids[k] = -1;
    if (exists)
      row.ids[k] = math::valid_id(load_integer(source.data, source.dtype, line * row.top_k + k),
                                  row.columns);
  });
  __syncwarp();
}

// PhiMoE's evaluation rule: two steps, each with the softmax of its own neighbourhood.
__device__ void select_mixer(const moec_router_desc& desc, const RouteRow& row) {
  const MixerStep first = mixer_step(desc.mixer_eps, row, -1);
  __syncwarp();
  const MixerStep second = mixer_step(desc.mixer_eps, row, first.id);
  const bool swap = desc.slot_order == MOEC_SLOT_BY_EXPERT && math::later(first.id, second.id);
  if (lane_id() != 0) return;
  row.ids[swap] = first.id, row.w[swap] = first.weight;
  row.ids[!swap] = second.id, row.w[!swap] = second.weight;
}

// chooses: what rounded_scores() said.
__device__ void choose(const ForwardParams& p, int64_t t, const RouteRow& row, bool chooses) {
  const moec_router_desc& desc = p.desc;
  const bool mixer = desc.selection == MOEC_SELECT_SPARSE_MIXER;
  const bool given = math::has_given_ids(desc.selection);
  const bool by_score = !mixer && !given && chooses;
  if (mixer)
    select_mixer(desc, row);
  else if (given)
    take_given(p, t, row);
  else if (by_score)
    select_by_score(p, row);
  else
    for_columns(row.top_k, [&](int k) { row.ids[k] = -1; });
  if (by_score && desc.slot_order == MOEC_SLOT_BY_EXPERT && lane_id() == 0)
    math::sort_by_expert(row.ids, row.top_k);
  __syncwarp();
  const WarpSlots slots{row.top_k};
  const Array& scale = p.args.per_expert_scale;
  const float* const bias = by_score ? p.args.select_bias : nullptr;
  if (!mixer) math::raw_weights(slots, desc, row.s, row.z, bias, row.ids, row.w);
  math::finish_weights(slots, desc, scale.data, scale.dtype, row.ids, row.w);
  __syncwarp();
}

// Whether this call might bring a count of 32 bits past its largest number, by a warp. What others
// have added by now does no harm: where nobody can come so far, nobody sees that he might.
__device__ bool may_saturate(const ForwardParams& p, int columns) {
  if (p.args.counts.dtype != MOEC_I32) return false;  // or there are none
  const int32_t* const counts = static_cast<const int32_t*>(p.args.counts.data);
  const int64_t most = INT32_MAX - p.args.num_tokens * p.desc.top_k;
  bool near = false;
  for_columns(columns, [&](int i) { near |= __ldcg(counts + i) > most; });
  return __any_sync(kAllLanes, near);
}
__device__ void add_one(const Array& counts, int32_t id, bool saturates) {
  if (counts.dtype == MOEC_I64) {
    atomicAdd(static_cast<unsigned long long*>(counts.data) + id, 1ull);
    return;
  }
  int32_t* const count = static_cast<int32_t*>(counts.data) + id;
  if (!saturates) {
    atomicAdd(count, 1);
    return;
  }
  for (int32_t seen = __ldcg(count); seen < INT32_MAX;) {
    const int32_t now = atomicCAS(count, seen, seen + 1);
    if (now == seen) return;
    seen = now;
  }
}

__global__ void route_forward_kernel(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(16) char shared[];
  begin_kernel();
  const RouteRow row = p.places.row(shared);
  const bool saturates = may_saturate(p, row.columns);
  for (int64_t t = p.places.first_row(); t < p.args.num_tokens; t += p.places.row_step()) {
    load_capped_row(p.desc, p.args.logits, t, row);
    const bool chooses = rounded_scores(p.desc, row);
    if (p.args.scores)
      for_columns(row.columns, [&](int i) { p.args.scores[t * row.columns + i] = row.s[i]; });
    __syncwarp();
    const bool routed = !p.args.token_mask || p.args.token_mask[t];
    if (routed) choose(p, t, row, chooses);
    for_columns(row.top_k, [&](int k) {
      const int32_t id = routed ? row.ids[k] : -1;
      p.args.expert_ids[t * row.top_k + k] = id;
      p.args.routing_weights[t * row.top_k + k] = routed ? row.w[k] : 0.0f;
      if (p.args.counts && id >= 0) add_one(p.args.counts, id, saturates);
    });
    __syncwarp();
  }
}

constexpr int kUpdateThreads = 1024;

__global__ __launch_bounds__(kUpdateThreads) void bias_update_kernel(const BiasUpdateArgs args) {
  using Reduce = cub::BlockReduce<int64_t, kUpdateThreads>;
  __shared__ Reduce::TempStorage reduce;
  __shared__ int64_t total;
  begin_kernel();
  const auto count = [&](int e) { return load_integer(args.counts.data, args.counts.dtype, e); };
  int64_t counted = 0;
  for (int e = threadIdx.x; e < args.num_ids; e += kUpdateThreads) counted += count(e);
  counted = Reduce(reduce).Sum(counted);
  if (threadIdx.x == 0) total = counted;
  __syncthreads();
  for (int e = threadIdx.x; e < args.num_ids; e += kUpdateThreads)
    args.bias[e] += args.rate * math::balance_direction(total, count(e), args.num_ids);
}

}  // namespace

moec_size route_scratch(const moec_router_desc& desc) {
  const int64_t columns = int64_t(desc.num_experts) + desc.num_zero_experts;
  const bool scaled = desc.flags & MOEC_ROUTER_PER_EXPERT_SCALE;
  return {RowPlaces::scratch_bytes(columns, desc.top_k) +
              (scaled ? scale_gradient_bytes(columns) : 0) + 2 * kCacheLine,
          scaled ? uint64_t(desc.top_k) * sizeof(float) : 0};
}

void route_forward(const Op& op, const RouteArgs& args) {
  static std::atomic<uint64_t> allowed;
  const int64_t columns = int64_t(args.desc->num_experts) + args.desc->num_zero_experts;
  const Scratch rows(op, RowPlaces::scratch_bytes(columns, args.desc->top_k));
  const RowPlaces places(columns, args.desc->top_k, rows.as<char>());
  check(allow_shared_memory(route_forward_kernel, RowPlaces::kSharedBytes, allowed), "route");
  if (args.num_tokens > 0)
    run(op, "route", route_forward_kernel, places.grid(args.num_tokens, op.multiprocessors),
        places.threads(), places.shared_bytes(), ForwardParams{*args.desc, args, places});
}

void bias_update(const Op& op, const BiasUpdateArgs& args) {
  run(op, "bias update", bias_update_kernel, dim3(1), kUpdateThreads, 0, args);
}

}  // namespace moec::cuda
