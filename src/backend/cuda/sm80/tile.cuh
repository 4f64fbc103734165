// SPDX-License-Identifier: Apache-2.0
// What both portable kernels have in common: which tile a CTA computes, where its results go.
#pragma once

#include "backend/cuda/device/op.cuh"
#include "backend/cuda/device/span.cuh"
#include "backend/cuda/sm80/row_product_params.h"

namespace moec::cuda {

// The work of one CTA.
struct PortableTile {
  int group, part;
  int64_t first_row;  // of the group
  int64_t m0, m_end, n0;
  int64_t k_end;  // of one part
};

// Row products: blockIdx.x runs over tiles of n, then over the row tiles of all groups.
__device__ inline bool find_row_tile(const PortableGemm& p, PortableTile& t) {
  const int64_t tiles = (p.n + kPortableTile - 1) / kPortableTile;
  const int64_t columns = p.sum ? tiles : tiles * p.parts;
  int64_t index = blockIdx.x / columns;
  const int64_t column = blockIdx.x - index * columns;
  t.part = int(column / tiles);
  t.n0 = (column - t.part * tiles) * kPortableTile;
  t.k_end = p.k;
  t.group = 0;
  t.first_row = 0;
  t.m_end = p.groups.max_rows;
  if (p.groups.offsets) {
    const int lane = threadIdx.x & 31;
    int64_t before = 0;
    int owner = -1;
    for (int first = 0; first < p.groups.count && owner < 0; first += 32) {
      const int e = first + lane;
      const int rows = e < p.groups.count ? p.groups.counts[e] : 0;
      const int own = (rows + kPortableTile - 1) / kPortableTile;
      int end = own;
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, end, step);
        if (lane >= step) end += other;
      }
      const unsigned found = __ballot_sync(~0u, index < before + end);
      if (found) {
        owner = first + __ffs(found) - 1;
        before += __shfl_sync(~0u, end - own, owner - first);
        t.m_end = __shfl_sync(~0u, rows, owner - first);
      } else {
        before += __shfl_sync(~0u, end, 31);
      }
    }
    if (owner < 0) return false;
    t.group = owner;
    t.first_row = p.groups.offsets[owner];
    index -= before;
  }
  t.m0 = index * kPortableTile;
  return t.m0 < t.m_end;
}

// Weight gradients: blockIdx.x runs over tiles of n, then of m, then over groups.
__device__ inline bool find_weight_tile(const PortableGemm& p, PortableTile& t) {
  const unsigned across = unsigned((p.n + kPortableTile - 1) / kPortableTile);
  const unsigned row = blockIdx.x / across, down = gridDim.x / across / p.groups.count;
  t.group = int(row / down);
  t.m0 = int64_t(row - t.group * down) * kPortableTile;
  t.n0 = int64_t(blockIdx.x - row * across) * kPortableTile;
  t.m_end = p.m;
  t.part = 0;
  t.first_row = p.groups.offsets ? p.groups.offsets[t.group] : 0;
  t.k_end = p.groups.offsets ? p.groups.counts[t.group] : p.groups.max_rows;
  return t.k_end > 0 || !p.accumulate;
}

template <bool kWeightGradient>
__device__ __forceinline__ bool find_tile(const PortableGemm& p, PortableTile& t) {
  return kWeightGradient ? find_weight_tile(p, t) : find_row_tile(p, t);
}

// A finished tile passes through shared memory, so that one short loop stores it in whole rows:
// code unrolled over each thread's own values would not fit the instruction cache. Columns of row i
// are permuted by i, against bank conflicts.
constexpr int kPortableTileBytes = kPortableTile * kPortableTile * int(sizeof(float));

__device__ __forceinline__ float* staged(float* tile, int i, int j) {
  return tile + i * kPortableTile + (j ^ (i & 7) * 8);
}
__device__ __forceinline__ void stage_pair(float* tile, int i, int j, float low, float high) {
  *reinterpret_cast<float2*>(staged(tile, i, j)) = {low, high};
}

// Of group t.group, elements [j, j + 4) of the bias.
__device__ inline Span<4> load_bias(const PortableGemm& p, const PortableTile& t, int64_t j) {
  const Operand& from = p.bias[t.part];
  Span<4> bias = {};
  if (!(from.base || from.pointers)) return bias;
  const char* const base = from.of_group(t.group);
  for (int v = 0; v < 4; ++v)
    if (j + v < p.n) bias[v] = load_real(base, from.dtype, (j + v) * from.i_stride);
  return bias;
}

__device__ __forceinline__ float times_scale(const ColumnScales& s, int64_t row, int64_t column,
                                             float value) {
  if (s.ids && s.ids[s.row_token ? s.row_token[row] : row] != s.adapter[column]) return 0;
  return value * s.scale[column];
}

// Stores the staged tile; every thread of the CTA takes part. Four columns a thread, every eighth
// row: T where four neighbours may be stored at once.
constexpr int kPortableSpans = kPortableTile / 4,
              kPortableRowStep = kPortableThreads / kPortableSpans;
static_assert(kPortableRowStep == 8);  // the same permutation of columns in all rows of a thread

template <bool kWeightGradient, class T>
__device__ __forceinline__ void write_spans(const PortableGemm& p, char* base, int64_t row,
                                            int rows, int64_t column, const float* from,
                                            const Span<4>& bias) {
  auto* to = reinterpret_cast<Elements<T, 4>*>(base) + (row * p.c.i_stride + column) / 4;
  const int64_t step = kPortableRowStep * p.c.i_stride / 4;
#pragma unroll 2
  for (int i = 0; i < rows; i += kPortableRowStep, to += step) {
    const float4 v = *reinterpret_cast<const float4*>(from + i * kPortableTile);
    Span<4> sum = {v.x, v.y, v.z, v.w};
    if constexpr (!kWeightGradient) {
      add_scaled(sum, p.bias_weight ? p.bias_weight[row + i] : 1.0f, bias);
      if (p.column_scales.scale)
        for (int c = 0; c < 4; ++c)
          sum[c] = times_scale(p.column_scales, row + i, column + c, sum[c]);
    }
    if (p.accumulate) add_scaled(sum, 1.0f, load_elements(*to));
    store_elements(*to, sum);
  }
}

template <bool kWeightGradient>
__device__ void write_elements(const PortableGemm& p, char* base, int64_t row, int rows,
                               int64_t column, int columns, const float* from,
                               const Span<4>& bias) {
#pragma unroll 1
  for (int i = 0; i < rows; i += kPortableRowStep) {
    const float weight = kWeightGradient || !p.bias_weight ? 1.0f : p.bias_weight[row + i];
    const int64_t at = (row + i) * p.c.i_stride + column;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (c >= columns) break;
      const int64_t one = at + c * p.c.k_stride;
      float sum = from[i * kPortableTile + c];
      if constexpr (!kWeightGradient) {
        sum += weight * bias[c];
        if (p.column_scales.scale) sum = times_scale(p.column_scales, row + i, column + c, sum);
      }
      if (p.accumulate) sum += load_span<1>(base, p.c.dtype, one)[0];
      store_span(base, p.c.dtype, one, Span<1>{sum});
    }
  }
}

template <bool kWeightGradient>
__device__ void write_tile(const PortableGemm& p, const PortableTile& t, float* tile) {
  char* const base = const_cast<char*>(p.c.of_group(kWeightGradient ? t.group : 0));
  const int first = int(threadIdx.x) / kPortableSpans;
  const int rows = int(min(int64_t(kPortableTile), t.m_end - t.m0)) - first;  // from `first` on
  const int j = int(threadIdx.x) % kPortableSpans * 4;
  if (t.n0 + j >= p.n || rows <= 0) return;
  Span<4> bias = {};
  if constexpr (!kWeightGradient) bias = load_bias(p, t, t.n0 + j);
  const float* const from = staged(tile, first, j);
  const int64_t row = (kWeightGradient ? t.m0 : t.first_row + t.m0) + first;
  const int64_t column = (t.n0 + j) * p.c.k_stride + t.part * p.c_part;
  if (p.spans) {
    with_real(p.c.dtype, [&]<class T>() {
      write_spans<kWeightGradient, T>(p, base, row, rows, column, from, bias);
    });
  } else {
    write_elements<kWeightGradient>(p, base, row, rows, column,
                                    int(min(int64_t(4), p.n - t.n0 - j)), from, bias);
  }
}

}  // namespace moec::cuda
