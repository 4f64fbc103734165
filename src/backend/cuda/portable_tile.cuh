// SPDX-License-Identifier: Apache-2.0
// What both portable kernels have in common: which tile a CTA computes, where its results go.
#pragma once

#include "backend/cuda/op.cuh"
#include "backend/cuda/portable_params.h"
#include "core/dtype.h"

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

// Weight gradients: blockIdx.x runs over tiles of n, then of m; blockIdx.y over groups.
__device__ inline bool find_weight_tile(const PortableGemm& p, PortableTile& t) {
  const int64_t tiles = (p.n + kPortableTile - 1) / kPortableTile;
  t.m0 = blockIdx.x / tiles * kPortableTile;
  t.n0 = (blockIdx.x - blockIdx.x / tiles * tiles) * kPortableTile;
  t.m_end = p.m;
  t.group = int(blockIdx.y);
  t.part = 0;
  t.first_row = p.groups.offsets ? p.groups.offsets[t.group] : 0;
  t.k_end = p.groups.offsets ? p.groups.counts[t.group] : p.groups.max_rows;
  return t.k_end > 0 || !p.accumulate;
}

template <bool kWeightGradient>
__device__ __forceinline__ bool find_tile(const PortableGemm& p, PortableTile& t) {
  return kWeightGradient ? find_weight_tile(p, t) : find_row_tile(p, t);
}

// Writes c(m0 + i, n0 + j) and its right neighbour.
template <bool kWeightGradient>
struct TileWriter {
  const PortableGemm& p;
  const PortableTile& t;
  char* base;
  int64_t first;  // of this tile, elements

  __device__ TileWriter(const PortableGemm& gemm, const PortableTile& tile) : p(gemm), t(tile) {
    base = const_cast<char*>(p.c.of_group(kWeightGradient ? t.group : 0));
    const int64_t row = kWeightGradient ? t.m0 : t.first_row + t.m0;
    first = row * p.c.i_stride + t.n0 * p.c.k_stride + t.part * p.c_part;
  }
  __device__ float bias(int j) const {
    const Operand& from = p.bias[t.part];
    if (kWeightGradient || t.n0 + j >= p.n || !(from.base || from.pointers)) return 0;
    return load_real(from.of_group(t.group), from.dtype, (t.n0 + j) * from.i_stride);
  }
  // Of row i: what its bias is multiplied by.
  __device__ float bias_weight(int i) const {
    if (kWeightGradient || !p.bias_weight || t.m0 + i >= t.m_end) return 1;
    return p.bias_weight[t.first_row + t.m0 + i];
  }
  __device__ void store(int i, int j, float low, float high) const {
    if (t.m0 + i >= t.m_end) return;
    const int64_t at = first + i * p.c.i_stride + j * p.c.k_stride;
    if (!p.pairs || p.accumulate) {
      store_one(at, j, low);
      store_one(at + p.c.k_stride, j + 1, high);
    } else if (t.n0 + j < p.n) {
      with_real(p.c.dtype, [&]<class T>() {
        struct alignas(2 * sizeof(T)) Pair {
          T low, high;
        };
        reinterpret_cast<Pair*>(base)[at / 2] = {from_float<T>(low), from_float<T>(high)};
      });
    }
  }

 private:
  __device__ void store_one(int64_t at, int j, float value) const {
    if (t.n0 + j >= p.n) return;
    if (p.accumulate) value += load_real(base, p.c.dtype, at);
    store_real(base, p.c.dtype, at, value);
  }
};

}  // namespace moec::cuda
