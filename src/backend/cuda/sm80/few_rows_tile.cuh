// SPDX-License-Identifier: Apache-2.0
// What the kernels of few rows share: their tiles, and where sums go.
#pragma once

#include <algorithm>

#include "backend/cuda/sm80/few_rows_scales.cuh"
#include "backend/cuda/sm80/mma.cuh"

namespace moec::cuda {

// The rows of row tile `index`, if there is one. A lane looks at four groups.
__device__ __forceinline__ bool find_few_rows(const RowGroups& groups, int index, int tile_rows,
                                              PortableTile& t) {
  t.group = 0;
  t.first_row = 0;
  t.m_end = groups.max_rows;
  for (int first = 0, before = 0; groups.offsets; first += 128) {
    if (first >= groups.count) return false;
    const int own = first + 4 * few_lane();
    int rows[4], tiles[4], end = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i] = own + i < groups.count ? groups.counts[own + i] : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) end += tiles[i] = (rows[i] + tile_rows - 1) / tile_rows;
    const int of_lane = end;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, end, step);
      if (few_lane() >= step) end += other;
    }
    end += before;
    const unsigned found = __ballot_sync(~0u, index < end);
    if (found) {
      const int owner = __ffs(found) - 1;
      index -= __shfl_sync(~0u, end - of_lane, owner);
      int group = 0, of_group = __shfl_sync(~0u, rows[0], owner);
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const int skipped = __shfl_sync(~0u, tiles[i], owner);
        const int next = __shfl_sync(~0u, rows[i + 1], owner);
        if (group == i && index >= skipped) {
          index -= skipped;
          of_group = next;
          ++group;
        }
      }
      t.group = first + 4 * owner + group;
      t.m_end = of_group;
      t.first_row = groups.offsets[t.group];
      break;
    }
    before = __shfl_sync(~0u, end, 31);
  }
  t.m0 = int64_t(index) * tile_rows;
  return t.m0 < t.m_end;
}

// Groups with rows, and their row tiles, at most.
inline dim3 few_grid(const PortableGemm& p, int rows, int features) {
  const int64_t groups =
      p.groups.offsets ? std::min(int64_t(p.groups.count), p.groups.max_rows) : 1;
  const int64_t row_tiles = (p.groups.max_rows - groups) / rows + groups;
  return dim3(unsigned((p.n + features - 1) / features), unsigned(row_tiles),
              p.sum ? 1 : unsigned(p.parts));
}

// What elements of a part are made of; all threads write the book, a barrier follows.
__device__ __forceinline__ FewContext few_context(const PortableGemm& p, int part, float* book) {
  const ExpertQuant& of = p.codes[part].quant;
  const bool is_book = of.scheme == MOEC_SCHEME_CODEBOOK4;
  const int lane = few_lane();
  if (threadIdx.x < 32) book[lane] = is_book ? of.codebook[lane % 16] : float(lane - 15);
  return {ptx::shared_address(book), is_book ? 0 : 7, is_book ? 30 : 2,
          p.b[part].dtype == MOEC_F8_E5M2};
}

using FewSums = float[8][4];

// To row i of a tile and feature n.
__device__ __forceinline__ void store_few(const PortableGemm& p, const PortableTile& t, int i,
                                          int64_t n, float sum) {
  const int64_t row = t.first_row + t.m0 + i;
  const Operand& bias = p.bias[t.part];
  if (bias.base || bias.pointers)
    sum += (p.bias_weight ? p.bias_weight[row] : 1.0f) *
           load_span<1>(bias.of_group(t.group), bias.dtype, n * bias.i_stride)[0];
  const int64_t to = row * p.c.i_stride + n * p.c.k_stride + t.part * p.c_part;
  store_span(const_cast<char*>(static_cast<const char*>(p.c.base)), p.c.dtype, to, Span<1>{sum});
}

}  // namespace moec::cuda
