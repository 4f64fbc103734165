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

constexpr int kWarps = kBlockThreads / 32;
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
// A warp, or, where it is `wide`, a CTA.
struct Team {
  bool wide;
  int64_t size = wide ? kBlockThreads : 32, rank = threadIdx.x % unsigned(size);

  __device__ Spread all(const Spread& spread) const {
    __shared__ Spread of_warp[kWarps];
    const Spread mine = warp_spread(spread);
    if (!wide) return mine;
    __syncthreads();  // every thread has read what the call before left here
    if (lane_id() == 0) of_warp[threadIdx.x / 32] = mine;
    __syncthreads();
    Spread together = of_warp[0];
    for (int i = 1; i < kWarps; ++i) together.add(of_warp[i]);
    return together;
  }
};

// body(item, team) for each item, a team an item.
template <class Body>
__device__ __forceinline__ void for_each(int64_t items, const Team& team, const Body& body) {
  const int64_t teams = global_threads() / team.size;
  for (int64_t item = global_thread() / team.size; item < items; item += teams) body(item);
}

__global__ __launch_bounds__(kBlockThreads) void expert_bits_kernel(
    const __grid_constant__ QuantiseView v, uint32_t* bits) {
  begin_kernel();
  const Team team = {true};
  for_each(v.num_experts * v.expert_chunks.count, team,
           [&](int64_t chunk) { quant::expert_chunk(v, bits, chunk, team); });
}

template <class Rule>
__global__ __launch_bounds__(kBlockThreads) void tiles_kernel(
    const __grid_constant__ Rule rule, const __grid_constant__ QuantiseView v, bool wide) {
  begin_kernel();
  const Team team = {wide};
  for_each(v.tiles(), team, [&](int64_t tile) { quant::quantise_tile(rule, v, tile, team); });
}

__global__ __launch_bounds__(kBlockThreads) void group_sums_kernel(
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
__global__ __launch_bounds__(kBlockThreads) void nested_kernel(
    const __grid_constant__ NestedView v, const __grid_constant__ quant::DynamicMap map) {
  begin_kernel();
  const Team team = {false};
  for_each(v.groups(), team, [&](int64_t group) { quant::nested_group(v, map, group, team); });
}

__global__ __launch_bounds__(kBlockThreads) void pack_zeros_kernel(
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
  const bool wide = view.block_n * view.block_k > kWarpElements;
  run(op, "quantise", tiles_kernel<Rule>, grid(op, view.tiles(), wide ? 1 : kWarps), kBlockThreads,
      0, rule, view, wide);
}

}  // namespace

void quantise(const Op& op, const QuantiseArgs& args) {
  const QuantiseView& view = args.view;
  if (view.tiles() == 0) return;
  if (args.expert_bits)
    run(op, "quantise", expert_bits_kernel,
        grid(op, view.num_experts * view.expert_chunks.count, 1), kBlockThreads, 0, view,
        args.expert_bits);
  quant::with_rule(args.rule, [&](const auto& rule) { run_tiles(op, rule, view); });
  if (args.nested.codes) {
    static constexpr quant::DynamicMap kMap;
    const NestedView& nested = args.nested;
    run(op, "quantise", group_sums_kernel, grid(op, nested.groups(), kBlockThreads), kBlockThreads,
        0, nested);
    run(op, "quantise", mean_kernel, dim3(1), int(Chunks::kMax), 0, nested);
    run(op, "quantise", nested_kernel, grid(op, nested.groups(), kWarps), kBlockThreads, 0, nested,
        kMap);
  }
  if (args.packed_zeros.words)
    run(op, "quantise", pack_zeros_kernel, grid(op, args.packed_zeros.count(), kBlockThreads),
        kBlockThreads, 0, args.packed_zeros);
}

}  // namespace moec::cuda
