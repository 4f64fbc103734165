// SPDX-License-Identifier: Apache-2.0
// What both portable kernels have in common: which tile a CTA computes, where its results go.
#pragma once

#include "backend/cuda/device/op.cuh"
#include "backend/cuda/device/rotate.cuh"
#include "backend/cuda/device/span.cuh"
#include "backend/cuda/sm80/row_product_params.h"

namespace moec::cuda {

// The work of one CTA.
struct PortableTile {
  int group, part, first_row;  // first_row: of the group
  int64_t m0, m_end, n0;
  int64_t k_end;  // of one part
};

// Row products: blockIdx.x runs over tiles of n, then over the row tiles of all groups.
template <int kRows = kPortableTile>
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
      const int own = (rows + kRows - 1) / kRows;
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
  t.m0 = index * kRows;
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
  with_real(from.dtype, [&]<class T>() {
    const T* const first = reinterpret_cast<const T*>(base) + j * from.i_stride;
#pragma unroll
    for (int v = 0; v < 4; ++v)
      if (j + v < p.n) bias[v] = widened(first[v * from.i_stride]);
  });
  return bias;
}

// Stores the staged tile. Four columns a thread, every eighth row: T where four neighbours may be
// stored at once.
constexpr int kPortableSpans = kPortableTile / 4,
              kPortableRowStep = kPortableThreads / kPortableSpans;
static_assert(kPortableRowStep == 8);  // the same permutation of columns in all rows of a thread

// The places of a thread in the tile, and those of c that they go to.
struct ThreadSpans {
  float* from;
  int rows, columns;    // rows: from the first on
  int64_t row, column;  // of c; row: without its group
};

// Rows with their bias times the scales of their columns, in the tile.
__device__ inline void scale_columns(const PortableGemm& p, const ThreadSpans& s,
                                     const Span<4>& bias) {
  const ColumnScales& by = p.column_scales;
#pragma unroll 1
  for (int i = 0; i < s.rows; i += kPortableRowStep) {
    float4* const at = reinterpret_cast<float4*>(s.from + i * kPortableTile);
    const int64_t row = s.row + i;
    Span<4> sum = {at->x, at->y, at->z, at->w};
    add_scaled(sum, p.bias_weight ? p.bias_weight[row] : 1.0f, bias);
    const int32_t id = by.ids ? by.ids[by.row_token ? by.row_token[row] : row] : 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (c >= s.columns) break;
      const bool other = by.ids && id != by.adapter[s.column + c];
      sum[c] = other ? 0.0f : sum[c] * by.scale[s.column + c];
    }
    *at = {sum[0], sum[1], sum[2], sum[3]};
  }
}

// biased: bias is added.
template <class T>
__device__ __forceinline__ void write_spans(const PortableGemm& p, char* base, const ThreadSpans& s,
                                            bool biased, const Span<4>& bias) {
  auto* to = reinterpret_cast<Elements<T, 4>*>(base) + (s.row * p.c.i_stride + s.column) / 4;
  const int64_t step = kPortableRowStep * p.c.i_stride / 4;
#pragma unroll 2
  for (int i = 0; i < s.rows; i += kPortableRowStep, to += step) {
    const float4 v = *reinterpret_cast<const float4*>(s.from + i * kPortableTile);
    Span<4> sum = {v.x, v.y, v.z, v.w};
    if (biased) add_scaled(sum, p.bias_weight ? p.bias_weight[s.row + i] : 1.0f, bias);
    if (p.accumulate) add_scaled(sum, 1.0f, load_elements(*to));
    store_elements(*to, sum);
  }
}

__device__ inline void write_elements(const PortableGemm& p, char* base, const ThreadSpans& s,
                                      bool biased, Span<4> bias) {
#pragma unroll 1
  for (int i = 0; i < s.rows; i += kPortableRowStep) {
    const float weight = biased && p.bias_weight ? p.bias_weight[s.row + i] : 1.0f;
    int64_t at = (s.row + i) * p.c.i_stride + s.column;
#pragma unroll 1
    for (int c = 0; c < 4; ++c, at += p.c.k_stride) {
      float sum = s.from[i * kPortableTile + c];
      if (biased) sum += weight * bias[0];
      rotate(bias.v);
      if (c >= s.columns) continue;
      if (p.accumulate) sum += load_span<1>(base, p.c.dtype, at)[0];
      store_span(base, p.c.dtype, at, Span<1>{sum});
    }
  }
}

// By kPortableThreads threads: the tile's rows from t.m0 on.
__device__ __forceinline__ void write_tile(const PortableGemm& p, const PortableTile& t,
                                           float* tile, bool weight_gradient) {
  char* const base = const_cast<char*>(p.c.of_group(weight_gradient ? t.group : 0));
  const int thread = int(threadIdx.x) % kPortableThreads;
  const int first = thread / kPortableSpans;
  const int j = thread % kPortableSpans * 4;
  ThreadSpans s;
  s.from = staged(tile, first, j);
  s.rows = int(min(int64_t(kPortableTile), t.m_end - t.m0)) - first;
  s.columns = int(min(int64_t(4), p.n - t.n0 - j));
  if (s.columns <= 0 || s.rows <= 0) return;
  s.row = (weight_gradient ? t.m0 : t.first_row + t.m0) + first;
  s.column = (t.n0 + j) * p.c.k_stride + t.part * p.c_part;
  Span<4> bias = {};
  bool biased = !weight_gradient;
  if (!weight_gradient) {
    bias = load_bias(p, t, t.n0 + j);
    if (p.column_scales.scale) {
      scale_columns(p, s, bias);
      biased = false;
    }
  }
  if (p.spans)
    with_real(p.c.dtype, [&]<class T>() { write_spans<T>(p, base, s, biased, bias); });
  else
    write_elements(p, base, s, biased, bias);
}

}  // namespace moec::cuda
