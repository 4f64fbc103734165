// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/combine.h"

#include <algorithm>

#include "backend/cuda/element.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/ptx.cuh"

namespace moec::cuda {
namespace {

constexpr int kMaxThreads = 256, kThreadsOfSm = 1024;
constexpr int kSlots = 8;  // slots whose loads are in flight together
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
  return {row, row == kNone ? 0.0f : p.weights ? __ldg(p.weights + at) : 1.0f};
}

// Columns [8 * chunk, 8 * chunk + 8) of one token, by whole warps.
template <typename Element>
__device__ void combine_chunk(const CombineParams& p, int64_t t, Slot slot, int chunk, int chunks,
                              uint64_t once) {
  const uint4* const rows = static_cast<const uint4*>(p.rows) + chunk;
  const int64_t at = t * chunks + chunk;
  const bool inside = chunk < chunks;
  float sum[8] = {};
  for (int first = 0; first < p.top_k; first += kSlots) {
    if (first > 0 && first % 32 == 0) slot = find_slot(p, t, first + int(threadIdx.x & 31));
    uint4 value[kSlots] = {};
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int row = __shfl_sync(~0u, slot.row, first % 32 + i);
      const uint4* const from =
          row == kIdentity ? static_cast<const uint4*>(p.x) + at : rows + int64_t(row) * chunks;
      if (row != kNone && inside) value[i] = ptx::load_once(from, once);
    }
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      accumulate<Element>(sum, value[i], __shfl_sync(~0u, slot.weight, first % 32 + i));
    }
  }
  if (!inside) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] *= p.scale;
  if (p.bias) accumulate<Element>(sum, static_cast<const uint4*>(p.bias)[chunk], 1.0f);
  if (p.residual) accumulate<Element>(sum, static_cast<const uint4*>(p.residual)[at], 1.0f);
  static_cast<uint4*>(p.y)[at] = {pack<Element>(sum[0], sum[1]), pack<Element>(sum[2], sum[3]),
                                  pack<Element>(sum[4], sum[5]), pack<Element>(sum[6], sum[7])};
}

__device__ float sum_parts(const CombineParams& p, int64_t assignment) {
  const int row = p.assignment_row[assignment];
  float sum = 0;
  for (int part = 0; row >= 0 && part < p.parts; ++part) {
    sum += p.d_weight_parts[part * p.max_rows + row];
  }
  return sum;
}

// A CTA takes a token at a time and looks up the slots of its next one meanwhile. The gradients of
// a token's weights fall to its warps in turn.
template <typename Element>
__global__ __launch_bounds__(kMaxThreads,
                             kThreadsOfSm /
                                 kMaxThreads) void combine_kernel(const CombineParams p) {
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int chunks = p.y ? int(p.hidden / 8) : 0;
  const int lane = threadIdx.x & 31, warps = int(blockDim.x) / 32;
  const uint64_t once = ptx::policy_once();
  int turn = int(threadIdx.x) / 32;
  Slot next = find_slot(p, blockIdx.x, lane);
  for (int64_t t = blockIdx.x; t < p.num_tokens; t += gridDim.x) {
    const Slot slot = next;
    next = find_slot(p, t + gridDim.x, lane);
    if (turn == 0 && p.d_weights) {
      for (int64_t k = lane; k < p.top_k; k += 32) {
        p.d_weights[t * p.top_k + k] = sum_parts(p, t * p.top_k + k);
      }
    }
    turn = (turn == 0 ? warps : turn) - 1;
    for (int first = 0; first < chunks; first += int(blockDim.x)) {
      combine_chunk<Element>(p, t, slot, first + int(threadIdx.x), chunks, once);
    }
  }
}

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
  const int64_t chunks = std::max<int64_t>(p.hidden / 8, 1);
  const int64_t rounds = (chunks + kMaxThreads - 1) / kMaxThreads;  // of nearly equal width
  const int threads = int((chunks + rounds - 1) / rounds + 31) / 32 * 32;
  const int64_t resident = int64_t(multiprocessors) * (kThreadsOfSm / threads);
  const int grid = int(std::min(p.num_tokens, resident));
  const auto kernel = dtype == MOEC_BF16 ? combine_kernel<__nv_bfloat16> : combine_kernel<__half>;
  return launch(kernel, dim3(grid), threads, 0, stream, p);
}

}  // namespace moec::cuda
