// SPDX-License-Identifier: Apache-2.0
// Small tiles have a warp each, large ones a CTA: both run the body that a thread of the CPU runs.
#include "backend/cuda/weights/quantise.h"

#include "backend/cuda/device/check.h"
#include "backend/cuda/device/op.cuh"
#include "backend/cuda/device/warp.cuh"

namespace moec::cuda {
namespace {

using quant::NestedView;
using quant::QuantiseView;
using quant::Spread;

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int64_t kWarpElements = 1024;  // a larger tile has a CTA

__device__ Spread warp_spread(Spread spread) {
  for (int offset = 16; offset > 0; offset /= 2) {
    Spread other;
    other.low = __shfl_xor_sync(kAllLanes, spread.low, offset);
    other.high = __shfl_xor_sync(kAllLanes, spread.high, offset);
    other.bits = __shfl_xor_sync(kAllLanes, spread.bits, offset);
    spread.add(other);
  }
  return spread;
}
struct WarpTeam {
  static constexpr int kSize = 32;
  int64_t rank = lane_id(), size = kSize;
  __device__ Spread all(const Spread& spread) const { return warp_spread(spread); }
};
struct CtaTeam {
  static constexpr int kSize = kThreads;
  int64_t rank = threadIdx.x, size = kSize;
  __device__ Spread all(const Spread& spread) const {
    __shared__ Spread of_warp[kWarps];
    const Spread mine = warp_spread(spread);
    __syncthreads();  // every thread has read what the call before left here
    if (lane_id() == 0) of_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    Spread together = of_warp[0];
    for (int i = 1; i < kWarps; ++i) together.add(of_warp[i]);
    return together;
  }
};

// body(item, team) for each item, a team an item.
template <class Team, class Body>
__device__ __forceinline__ void for_each(int64_t items, const Body& body) {
  const int64_t teams = global_threads() / Team::kSize;
  for (int64_t item = global_thread() / Team::kSize; item < items; item += teams)
    body(item, Team());
}

__global__ __launch_bounds__(kThreads) void expert_bits_kernel(
    const __grid_constant__ QuantiseView v, uint32_t* bits) {
  begin_kernel();
  for_each<CtaTeam>(v.num_experts * v.expert_chunks.count, [&](int64_t chunk, const auto& team) {
    quant::expert_chunk(v, bits, chunk, team);
  });
}

template <class Rule, class Team>
__global__ __launch_bounds__(kThreads) void tiles_kernel(const __grid_constant__ Rule rule,
                                                         const __grid_constant__ QuantiseView v) {
  begin_kernel();
  for_each<Team>(v.tiles(), [&](int64_t tile, const auto& team) {
    quant::quantise_tile(rule, v, tile, team);
  });
}

__global__ __launch_bounds__(kThreads) void group_sums_kernel(
    const __grid_constant__ NestedView v) {
  begin_kernel();
  for (int64_t group = global_thread(); group < v.groups(); group += global_threads())
    quant::sum_group(v, group);
}
__global__ __launch_bounds__(Chunks::kMax) void mean_kernel(const __grid_constant__ NestedView v) {
  __shared__ double sums[Chunks::kMax];
  begin_kernel();
  if (threadIdx.x < v.chunks.count) sums[threadIdx.x] = quant::sum_chunk(v, threadIdx.x);
  __syncthreads();
  if (threadIdx.x == 0) quant::store_mean(v, sums);
}
__global__ __launch_bounds__(kThreads) void nested_kernel(
    const __grid_constant__ NestedView v, const __grid_constant__ quant::DynamicMap map) {
  begin_kernel();
  for_each<WarpTeam>(v.groups(), [&](int64_t group, const auto& team) {
    quant::nested_group(v, map, group, team);
  });
}

__global__ __launch_bounds__(kThreads) void pack_zeros_kernel(
    const __grid_constant__ quant::ZerosView v) {
  begin_kernel();
  for (int64_t word = global_thread(); word < v.count(); word += global_threads())
    quant::pack_zeros(v, word);
}

// CTAs for `items` of which a CTA does `each` at a time.
dim3 grid(const Op& op, int64_t items, int64_t each) {
  return grid_for(items, each, int64_t(op.multiprocessors) * 16);
}

template <class Rule>
void run_tiles(const Op& op, const Rule& rule, const QuantiseView& view) {
  if (view.block_n * view.block_k <= kWarpElements)
    run(op, "quantise", tiles_kernel<Rule, WarpTeam>, grid(op, view.tiles(), kWarps), kThreads, 0,
        rule, view);
  else
    run(op, "quantise", tiles_kernel<Rule, CtaTeam>, grid(op, view.tiles(), 1), kThreads, 0, rule,
        view);
}

}  // namespace

void quantise(const Op& op, const QuantiseArgs& args) {
  const QuantiseView& view = args.view;
  if (view.tiles() == 0) return;
  if (args.expert_bits)
    run(op, "quantise", expert_bits_kernel,
        grid(op, view.num_experts * view.expert_chunks.count, 1), kThreads, 0, view,
        args.expert_bits);
  quant::with_rule(args.rule, [&](const auto& rule) { run_tiles(op, rule, view); });
  if (args.nested.codes) {
    static constexpr quant::DynamicMap kMap;
    const NestedView& nested = args.nested;
    run(op, "quantise", group_sums_kernel, grid(op, nested.groups(), kThreads), kThreads, 0,
        nested);
    run(op, "quantise", mean_kernel, dim3(1), int(Chunks::kMax), 0, nested);
    run(op, "quantise", nested_kernel, grid(op, nested.groups(), kWarps), kThreads, 0, nested,
        kMap);
  }
  if (args.packed_zeros.words)
    run(op, "quantise", pack_zeros_kernel, grid(op, args.packed_zeros.count(), kThreads), kThreads,
        0, args.packed_zeros);
}

}  // namespace moec::cuda
