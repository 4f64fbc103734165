// SPDX-License-Identifier: Apache-2.0
// One token's row of logits, by one warp: scores, group limit, sparse mixer, and where it lies.
#pragma once

#include <algorithm>

#include "backend/cuda/device/op.cuh"
#include "backend/cuda/routing/warp_row.cuh"
#include "core/workspace.h"
#include "math/slots.h"

namespace moec::cuda {

// Scratch of one token. columns C = E+Z, lanes = C rounded up to 32.
struct RouteRow {
  int columns, lanes, top_k;
  float *z, *s, *c, *d;  // [lanes] capped logits, scores, choice scores, gradient or groups
  float *w, *d_w;        // [K]
  int32_t* ids;          // [K]

  __host__ __device__ static int64_t bytes(int64_t columns, int64_t top_k) {
    return (4 * padded_columns(int(columns)) + (3 * top_k + 3) / 4 * 4) * 4;
  }
  __device__ RouteRow(void* memory, int num_columns, int k)
      : columns(num_columns), lanes(padded_columns(num_columns)), top_k(k) {
    z = static_cast<float*>(memory);
    s = z + lanes;
    c = s + lanes;
    d = c + lanes;
    w = d + lanes;
    d_w = w + k;
    ids = reinterpret_cast<int32_t*>(d_w + k);
  }
};

// Where the rows of all warps of a grid lie: in shared memory, or, where a row is too large for
// it, in scratch.
struct RowPlaces {
  static constexpr int kSharedBytes = 96 << 10, kMostWarps = 8, kScratchRows = 128;

  int columns, top_k, warps;  // warps of one CTA
  int64_t row_bytes;
  char* scratch;  // null: shared memory

  RowPlaces() = default;
  RowPlaces(int64_t num_columns, int64_t k, char* memory)
      : columns(int(num_columns)), top_k(int(k)), row_bytes(RouteRow::bytes(num_columns, k)) {
    const bool shared = row_bytes <= kSharedBytes;
    warps = shared ? int(std::min<int64_t>(kSharedBytes / row_bytes, kMostWarps)) : 1;
    scratch = shared ? nullptr : memory;
  }
  static uint64_t scratch_bytes(int64_t num_columns, int64_t k) {
    const int64_t bytes = RouteRow::bytes(num_columns, k);
    return bytes <= kSharedBytes ? 0 : uint64_t(bytes) * kScratchRows;
  }
  int threads() const { return warps * 32; }
  int64_t shared_bytes() const { return scratch ? 0 : warps * row_bytes; }
  dim3 grid(int64_t rows, int multiprocessors) const {
    return grid_for(rows, warps, scratch ? kScratchRows : multiprocessors * 16);
  }
  __device__ int64_t first_row() const { return int64_t(blockIdx.x) * warps + threadIdx.x / 32; }
  __device__ int64_t row_step() const { return int64_t(gridDim.x) * warps; }
  __device__ RouteRow row(char* shared) const {
    return RouteRow(
        scratch ? scratch + first_row() * row_bytes : shared + threadIdx.x / 32 * row_bytes,
        columns, top_k);
  }
};

// Row t of [.., columns] as fp32; the padding is -inf.
__device__ inline void load_row(const Array& logits, int64_t t, const RouteRow& row) {
  for_columns(row.lanes, [&](int i) {
    row.z[i] = i < row.columns ? load_real(logits.data, logits.dtype, t * row.columns + i)
                               : -__builtin_inff();
  });
}
// R2
__device__ inline void load_capped_row(const moec_router_desc& desc, const Array& logits, int64_t t,
                                       const RouteRow& row) {
  load_row(logits, t, row);
  if (desc.logit_softcap != 0.0f)
    for_columns(row.columns,
                [&](int i) { row.z[i] = math::softcap(row.z[i], desc.logit_softcap); });
}

// R3. Softmax padding is 0; the padding of other scores means nothing. Returns whether the scores
// choose anybody: false for a softmax of nothing but -inf.
__device__ inline bool score_row(uint32_t score, const RouteRow& row) {
  const bool over_row = math::score_is_over_row(score);
  const float largest = over_row ? math::SoftmaxScore::reference(row_max(row.z, row.lanes)) : 0.0f;
  for_columns(row.lanes, [&](int i) { row.s[i] = math::score_value(score, row.z[i], largest); });
  if (!over_row) return true;
  const float sum = row_sum(row.s, row.lanes);
  for_columns(row.lanes, [&](int i) { row.s[i] /= sum; });
  return sum != 0.0f;
}
// R3 with its rounding.
__device__ inline bool rounded_scores(const moec_router_desc& desc, const RouteRow& row) {
  const bool chooses = score_row(desc.score, row);
  const math::RoundTo round(desc, desc.score_precision);
  for_columns(row.columns, [&](int i) { row.s[i] = round(row.s[i]); });
  return chooses;
}

// One step of the sparse mixer: the best logit but for column `taken` (-1: none), and in row.s the
// softmax over the logits near it, 0 elsewhere. id -1: nobody is left.
struct MixerStep {
  int32_t id;
  float weight;
};
__device__ inline MixerStep mixer_step(float eps, const RouteRow& row, int32_t taken) {
  int64_t mine = math::kNoKey;
  for_columns(row.columns, [&](int i) {
    const int64_t key = math::rank_key(row.z[i], i);
    if (i != taken && key > mine) mine = key;
  });
  const int64_t best = warp_max_key(mine);
  const bool found = math::is_selectable_key(best);
  const int32_t id = found ? math::key_id(best) : -1;
  const float largest = found ? row.z[id] : 0.0f;
  __syncwarp();
  for_columns(row.lanes, [&](int i) {
    const bool keeps = found && i < row.columns && i != taken && math::is_selectable(row.z[i]) &&
                       math::mixer_keeps(row.z[i], largest, eps);
    row.s[i] = keeps ? math::exp(row.z[i] - largest) : 0.0f;
  });
  if (!found) return {-1, 0.0f};
  const float sum = row_sum(row.s, row.lanes);
  for_columns(row.lanes, [&](int i) { row.s[i] /= sum; });
  __syncwarp();
  return {id, row.s[id]};
}

}  // namespace moec::cuda
