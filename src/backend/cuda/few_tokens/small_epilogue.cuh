// SPDX-License-Identifier: Apache-2.0
// The sums of an item of the small-token kernels and where they go. 8x8 blocks are transposed among
// the lanes, so that a row's features leave together.
#pragma once

#include "backend/cuda/few_tokens/activate.cuh"
#include "backend/cuda/few_tokens/small_gemm.h"
#include "backend/cuda/few_tokens/small_mma.cuh"
#include "backend/cuda/few_tokens/small_walk.cuh"

namespace moec::cuda {

// Features of `down` that a CTA owns.
struct OwnFeatures {
  int begin, end;
  __device__ explicit OwnFeatures(const SmallArgs& p)
      : begin(int(p.features / 8 * blockIdx.x / gridDim.x) * 8),
        end(int(p.features / 8 * (blockIdx.x + 1) / gridDim.x) * 8) {}
};

template <typename Element>
__device__ __forceinline__ float bias_of(const SmallBias& bias, int expert, int feature) {
  if (!bias.base) return 0;
  const int64_t at = expert * bias.expert_stride + feature * bias.stride;
  return bias.f32 ? static_cast<const float*>(bias.base)[at]
                  : float(static_cast<const Element*>(bias.base)[at]);
}

// Eight features from `feature` of an item's rows; the values (rows 2c, 2c + 1 of feature g) lie in
// the lanes as accumulators do.
template <typename Element>
__device__ __forceinline__ void store_cell(void* out, int64_t stride, int64_t feature,
                                           const SmallItem& item, float2 values) {
  const int lane = threadIdx.x & 31, row = lane / 4;
  const uint32_t pair = transpose_matrix(pack<Element>(values.x, values.y));
  if (row < item.rows) {
    Element* const to = static_cast<Element*>(out) + (item.row_begin + row) * stride + feature;
    *reinterpret_cast<uint32_t*>(to + lane % 4 * 2) = pair;
  }
}

// up: gate and up of eight features are rows g and g + 8.
template <typename Element>
__device__ __forceinline__ void store_activated(const SmallArgs& p, const SmallItem& item,
                                                const float (&sums)[4]) {
  const int feature = item.block * 8, mine = feature + int(threadIdx.x) % 32 / 4;
  const float gate_bias = bias_of<Element>(p.bias[0], item.expert, mine);
  const float up_bias = bias_of<Element>(p.bias[1], item.expert, mine);
  const float2 g = {sums[0] + gate_bias, sums[1] + gate_bias};
  const float2 u = {sums[2] + up_bias, sums[3] + up_bias};
  if (p.pre) {
    store_cell<Element>(p.pre, 2 * p.features, feature, item, g);
    store_cell<Element>(p.pre, 2 * p.features, p.features + feature, item, u);
  }
  store_cell<Element>(p.out, p.features, feature, item,
                      {activate(p.activation, g.x, u.x), activate(p.activation, g.y, u.y)});
}

// down: rows g and g + 8 are the sums of one feature over two halves of k, the first in columns
// 0..3 (lanes c = 0, 1), the second in columns 4..7 (c + 2), of the same tokens.
template <typename Element>
__device__ __forceinline__ void store_rows(const SmallArgs& p, const OwnFeatures& own,
                                           const SmallItem& item, const float (&sums)[4]) {
  const int feature = own.begin + item.block * 8;
  const float bias = bias_of<Element>(p.bias[0], item.expert, feature + int(threadIdx.x) % 32 / 4);
  const float second[2] = {__shfl_xor_sync(~0u, sums[2], 2), __shfl_xor_sync(~0u, sums[3], 2)};
  store_cell<Element>(p.out, p.features, feature, item,
                      {sums[0] + second[0] + bias, sums[1] + second[1] + bias});
}

// Two columns of y, from rows that this CTA's own threads have written (so never through the
// read-only path): fp32, slots in order, one rounding.
template <typename Element>
__device__ __forceinline__ float2 combine_pair(const CombineParams& p, int64_t t, int64_t pair) {
  const int64_t pairs = p.hidden / 2;
  float2 sum = {};
  const auto add = [&](const void* from, int64_t at, float weight) {
    const float2 v = unpack<Element>(static_cast<const uint32_t*>(from)[at * pairs + pair]);
    sum.x = fmaf(weight, v.x, sum.x);
    sum.y = fmaf(weight, v.y, sum.y);
  };
#pragma unroll 8
  for (int k = 0; k < p.top_k; ++k) {
    const int64_t at = t * p.top_k + k;
    const int row = p.assignment_row[at];
    const int zero = p.num_zero > 0 ? p.expert_ids[at] - p.num_experts : -1;
    const bool identity = zero >= 0 && zero < p.num_zero;
    const float weight = p.routing_weights[at];
    if ((row >= 0 || identity) && weight != 0.0f)
      add(identity ? p.x : p.rows, identity ? t : row, weight);
  }
  sum.x *= p.scale;
  sum.y *= p.scale;
  if (p.bias) add(p.bias, 0, 1.0f);
  if (p.residual) add(p.residual, t, 1.0f);
  return sum;
}

template <typename Element>
__device__ void combine_columns(const SmallArgs& p, const OwnFeatures& own) {
  const int begin = own.begin / 2, width = own.end / 2 - begin;
  const int64_t items = p.combine.num_tokens * width;
  for (int64_t i = threadIdx.x; i < items; i += blockDim.x) {
    const int64_t t = i / width, pair = begin + (i - t * width);
    const float2 sum = combine_pair<Element>(p.combine, t, pair);
    static_cast<uint32_t*>(p.combine.y)[t * (p.combine.hidden / 2) + pair] =
        pack<Element>(sum.x, sum.y);
  }
}

}  // namespace moec::cuda
