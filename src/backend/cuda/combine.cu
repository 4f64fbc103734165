// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/combine.h"

#include <algorithm>
#include <iterator>

#include "backend/cuda/element.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/ptx.cuh"

namespace moec::cuda {
namespace {

constexpr int kMaxThreads = 256, kThreadsOfSm = 1024;
constexpr int kInFlight = 8;  // loads of a thread
constexpr int kNone = -1, kIdentity = -2;

template <typename Element>
__device__ void accumulate(float (&sum)[8], uint4 v, float weight) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<Element>(words[i]);
    sum[2 * i] = fmaf(weight, pair.x, sum[2 * i]);
    sum[2 * i + 1] = fmaf(weight, pair.y, sum[2 * i + 1]);
  }
}

// Slot k of a token, held by lane k % 32 of each warp.
struct Slot {
  int row;  // or kNone, kIdentity
  float weight;
};
__device__ Slot find_slot(const CombineParams& p, int64_t t, int k) {
  if (t >= p.num_tokens || k >= p.top_k) return {kNone, 0.0f};
  const int64_t at = t * p.top_k + k;
  int row = max(__ldg(p.assignment_row + at), kNone);
  if (p.num_zero > 0) {
    const int id = __ldg(p.expert_ids + at) - p.num_experts;
    if (id >= 0 && id < p.num_zero) row = kIdentity;
  }
  const float weight = row == kNone ? 0.0f : p.weights ? __ldg(p.weights + at) : 1.0f;
  if (weight == 0.0f) return {kNone, 0.0f};
  return {row, p.counts_once ? 1.0f : weight};
}

// Slots of one token that are summed together: the same in all lanes of a warp.
template <int kSlots>
struct Slots {
  int row[kSlots];
  float weight[kSlots];
  bool have_rows;  // all of them

  // Those that lanes first, first + 1, .. hold.
  __device__ Slots(Slot held, int first) {
    int signs = 0;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      row[i] = __shfl_sync(~0u, held.row, first + i);
      weight[i] = __shfl_sync(~0u, held.weight, first + i);
      signs |= row[i];
    }
    have_rows = signs >= 0;
  }
};

// A thread takes kWide chunks of a token together, 8 columns each: of all rows, when there are few.
template <int kSlots>
constexpr int kWide = kSlots <= kInFlight / 2 ? 2 : 1;
template <int kSlots>
struct Chunks {
  int64_t token;
  int first, step, count;  // chunks first, first + step, .. of the count of a row

  __device__ int chunk(int i) const { return first + i * step; }
  __device__ bool inside(int i) const { return chunk(i) < count; }
  __device__ int64_t at(int i) const { return token * count + chunk(i); }
};
template <int kSlots>
using Sums = float[kWide<kSlots>][8];

template <typename Element, int kSlots>
__device__ void add_rows(const CombineParams& p, const Slots<kSlots>& slots,
                         const Chunks<kSlots>& chunks, uint64_t once, Sums<kSlots>& sums) {
  uint4 value[kWide<kSlots>][kSlots];
#pragma unroll
  for (int c = 0; c < kWide<kSlots>; ++c) {
    const char* const rows = static_cast<const char*>(p.rows) + 16 * int64_t(chunks.chunk(c));
    const auto load = [&](int row) {
      const uint64_t offset = uint64_t(uint32_t(row)) * uint32_t(16 * chunks.count);
      return ptx::load_once(reinterpret_cast<const uint4*>(rows + offset), once);
    };
    if (slots.have_rows && chunks.inside(c)) {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) value[c][i] = load(slots.row[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        value[c][i] = {};
        if (!chunks.inside(c) || slots.row[i] == kNone) continue;
        value[c][i] = slots.row[i] == kIdentity
                          ? ptx::load_once(static_cast<const uint4*>(p.x) + chunks.at(c), once)
                          : load(slots.row[i]);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kWide<kSlots>; ++c) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) accumulate<Element>(sums[c], value[c][i], slots.weight[i]);
  }
}

template <typename Element, int kSlots>
__device__ void store_sums(const CombineParams& p, const Chunks<kSlots>& chunks,
                           Sums<kSlots>& sums) {
#pragma unroll
  for (int c = 0; c < kWide<kSlots>; ++c) {
    if (!chunks.inside(c)) break;
    float (&sum)[8] = sums[c];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] *= p.scale;
    const uint4* const bias = static_cast<const uint4*>(p.bias);
    const uint4* const residual = static_cast<const uint4*>(p.residual);
    if (bias) accumulate<Element>(sum, bias[chunks.chunk(c)], 1.0f);
    if (residual) accumulate<Element>(sum, residual[chunks.at(c)], 1.0f);
    static_cast<uint4*>(p.y)[chunks.at(c)] = {
        pack<Element>(sum[0], sum[1]), pack<Element>(sum[2], sum[3]), pack<Element>(sum[4], sum[5]),
        pack<Element>(sum[6], sum[7])};
  }
}

// One token's row of y. held: its first 32 slots. kTopK: how many it has, 0: any number.
template <typename Element, int kTopK>
__device__ void combine_token(const CombineParams& p, int64_t t, Slot held, uint64_t once) {
  constexpr int kSlots = kTopK ? kTopK : kInFlight;
  Chunks<kSlots> chunks = {t, int(threadIdx.x), int(blockDim.x), int(p.hidden / 8)};
  const auto each_chunk = [&](auto add) {
    for (; chunks.first - int(threadIdx.x) < chunks.count;
         chunks.first += kWide<kSlots> * chunks.step) {
      Sums<kSlots> sums = {};
      add(sums);
      store_sums<Element>(p, chunks, sums);
    }
  };
  if constexpr (kTopK > 0) {
    const Slots<kSlots> slots(held, 0);
    each_chunk([&](Sums<kSlots>& sums) { add_rows<Element>(p, slots, chunks, once, sums); });
  } else {
    each_chunk([&](Sums<kSlots>& sums) {
      Slot some = held;
      for (int k = 0; k < p.top_k; k += kSlots) {
        if (k > 0 && k % 32 == 0) some = find_slot(p, t, k + int(threadIdx.x & 31));
        add_rows<Element>(p, Slots<kSlots>(some, k % 32), chunks, once, sums);
      }
    });
  }
}

__device__ float sum_parts(const CombineParams& p, int64_t assignment) {
  const int row = p.assignment_row[assignment];
  if (row < 0) return 0.0f;
  const float* part = p.d_weight_parts + row;
  float sum = 0;
#pragma unroll 8
  for (int i = 0; i < p.parts; ++i, part += p.max_rows) sum += __ldg(part);
  return sum;
}

// A CTA takes a token at a time and looks up the slots of its next one meanwhile, those of the
// first while it waits. The gradients of a token's weights fall to its warps in turn.
template <typename Element, int kTopK>
__global__ __launch_bounds__(kMaxThreads,
                             kThreadsOfSm /
                                 kMaxThreads) void combine_kernel(const CombineParams p) {
  const int lane = threadIdx.x & 31, warps = int(blockDim.x) / 32;
  const uint64_t once = ptx::policy_once();
  int turn = int(threadIdx.x) / 32;
  Slot next = find_slot(p, blockIdx.x, lane);
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  for (int64_t t = blockIdx.x; t < p.num_tokens; t += gridDim.x) {
    const Slot held = next;
    next = find_slot(p, t + gridDim.x, lane);
    if (turn == 0 && p.d_weights) {
      for (int64_t k = lane; k < p.top_k; k += 32) {
        p.d_weights[t * p.top_k + k] = sum_parts(p, t * p.top_k + k);
      }
    }
    turn = (turn == 0 ? warps : turn) - 1;
    if (p.y) combine_token<Element, kTopK>(p, t, held, once);
  }
}

struct Combine {
  void (*kernel)(CombineParams);
  int wide;
};
template <typename Element, int kTopK>
constexpr Combine kCombine = {combine_kernel<Element, kTopK>, kWide<kTopK ? kTopK : kInFlight>};
template <typename Element>
constexpr Combine kCombines[] = {  // by the number of slots; the first is for any other, too
    kCombine<Element, 0>, kCombine<Element, 1>, kCombine<Element, 2>,
    kCombine<Element, 0>, kCombine<Element, 4>, kCombine<Element, 0>,
    kCombine<Element, 6>, kCombine<Element, 0>, kCombine<Element, 8>};

}  // namespace

const char* combine_refuses(const CombineParams& p, moec_dtype dtype) {
  if (dtype != MOEC_BF16 && dtype != MOEC_F16) return "elements other than bf16 and f16";
  if (p.hidden % 8) return "a hidden size that is not a multiple of 8";
  for (const void* pointer : {p.rows, p.x, p.residual, p.bias, static_cast<const void*>(p.y)}) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16) return "rows that are not aligned to 16 bytes";
  }
  return nullptr;
}

cudaError_t launch_combine(const CombineParams& p, moec_dtype dtype, int multiprocessors,
                           cudaStream_t stream) {
  if (p.num_tokens == 0) return cudaSuccess;
  const auto& combines = dtype == MOEC_BF16 ? kCombines<__nv_bfloat16> : kCombines<__half>;
  const Combine combine = combines[p.top_k < int(std::size(combines)) ? p.top_k : 0];
  const int64_t chunks = std::max<int64_t>((p.hidden / 8 + combine.wide - 1) / combine.wide, 1);
  const int64_t rounds = (chunks + kMaxThreads - 1) / kMaxThreads;  // of nearly equal width
  const int threads = int((chunks + rounds - 1) / rounds + 31) / 32 * 32;
  const int64_t resident = int64_t(multiprocessors) * (kThreadsOfSm / threads);
  const int grid = int(std::min(p.num_tokens, resident));
  return launch(combine.kernel, dim3(grid), threads, 0, stream, p);
}

}  // namespace moec::cuda
