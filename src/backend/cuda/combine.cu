// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/combine.h"

#include <algorithm>

#include "backend/cuda/element.cuh"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/ptx.cuh"

namespace moec::cuda {
namespace {

constexpr int kThreads = 256, kSlots = 8;  // slots whose loads are in flight together

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

// Columns [8 * chunk, 8 * chunk + 8) of one token.
template <typename Element>
__device__ void combine_chunk(const CombineParams& p, int64_t t, int64_t chunk, int64_t chunks) {
  const uint4* const rows = static_cast<const uint4*>(p.rows) + chunk;
  float sum[8] = {};
  for (int first = 0; first < p.top_k; first += kSlots) {
    uint4 value[kSlots];
    float weight[kSlots];
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int64_t at = t * p.top_k + first + i;
      const bool slot = first + i < p.top_k;
      const int row = slot ? __ldg(p.assignment_row + at) : -1;
      const uint4* from = row >= 0 ? rows + row * chunks : nullptr;
      if (p.num_zero > 0 && slot) {
        const int id = __ldg(p.expert_ids + at) - p.num_experts;
        if (id >= 0 && id < p.num_zero) from = static_cast<const uint4*>(p.x) + t * chunks + chunk;
      }
      weight[i] = from && p.weights ? __ldg(p.weights + at) : 1.0f;
      value[i] = from ? __ldg(from) : uint4{};
      if (!from) weight[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < kSlots; ++i) accumulate<Element>(sum, value[i], weight[i]);
  }
  const int64_t at = t * chunks + chunk;
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

template <typename Element>
__global__ __launch_bounds__(kThreads) void combine_kernel(const CombineParams p) {
  ptx::grid_dependency_wait();
  ptx::grid_dependency_launch();
  const int64_t chunks = p.y ? p.hidden / 8 : 0, columns = p.num_tokens * chunks;
  const int64_t items = columns + (p.d_weights ? p.num_tokens * p.top_k : 0);
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < items;
       i += int64_t(gridDim.x) * kThreads) {
    if (i < columns) {
      const int64_t t = i / chunks;
      combine_chunk<Element>(p, t, i - t * chunks, chunks);
    } else {
      p.d_weights[i - columns] = sum_parts(p, i - columns);
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
  const int64_t items = p.num_tokens * (p.hidden / 8 + p.top_k);
  const int grid = int(std::min<int64_t>((items + kThreads - 1) / kThreads, multiprocessors * 8));
  const auto kernel = dtype == MOEC_BF16 ? combine_kernel<__nv_bfloat16> : combine_kernel<__half>;
  return launch(kernel, dim3(grid), kThreads, 0, stream, p);
}

}  // namespace moec::cuda
