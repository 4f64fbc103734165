// SPDX-License-Identifier: Apache-2.0
// One token's row of logits: scores, order, selection. Rows are padded to groups of 32 lanes;
// a sum over a row is made of 32 partial sums (lane = column mod 32) that are then halved, as a
// warp does it, so that a GPU gives the same bits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "backend/args.h"
#include "backend/cpu/gemm.h"
#include "core/dtype.h"
#include "core/workspace.h"
#include "math/router.h"
#include "math/slots.h"

namespace moec::cpu {

inline constexpr int64_t kRowLanes = 32;
inline int64_t padded_columns(int64_t columns) {
  return int64_t(round_up(uint64_t(columns), kRowLanes));
}

using math::RoundTo;

// Row t of [.., columns] as fp32; the padding is -inf.
inline void load_row(const Array& logits, int64_t t, int64_t columns, float* z) {
  const int64_t bytes = dtype_bytes(logits.dtype);
  convert_to_f32(static_cast<const char*>(logits.data) + t * columns * bytes, logits.dtype, z,
                 columns);
  for (int64_t i = columns; i < padded_columns(columns); ++i) z[i] = -INFINITY;
}

inline float row_max(const float* values, int64_t lanes) {  // ignores NaN
  float best[kRowLanes];
  for (float& b : best) b = -INFINITY;
  for (int64_t i = 0; i < lanes; i += kRowLanes)
    for (int64_t l = 0; l < kRowLanes; ++l)
      best[l] = values[i + l] > best[l] ? values[i + l] : best[l];
  for (int64_t width = kRowLanes / 2; width > 0; width /= 2)
    for (int64_t l = 0; l < width; ++l)
      best[l] = best[l + width] > best[l] ? best[l + width] : best[l];
  return best[0];
}

inline float sum_lanes(float* partial) {  // [32]; destroyed
  for (int64_t width = kRowLanes / 2; width > 0; width /= 2)
    for (int64_t l = 0; l < width; ++l) partial[l] += partial[l + width];
  return partial[0];
}
inline float row_sum(const float* values, int64_t lanes) {
  float partial[kRowLanes] = {};
  for (int64_t i = 0; i < lanes; i += kRowLanes)
    for (int64_t l = 0; l < kRowLanes; ++l) partial[l] += values[i + l];
  return sum_lanes(partial);
}

// R3. Softmax padding is 0; the padding of other scores means nothing. Returns whether the scores
// choose anybody: false for a softmax of nothing but -inf.
template <class Kind>
bool score_lanes(const float* z, int64_t lanes, float* s) {
  for (int64_t i = 0; i < lanes; ++i) s[i] = Kind::value(z[i]);
  return true;
}
template <class Kind>
bool score_whole_row(const float* z, int64_t lanes, float* s) {
  const float largest = Kind::reference(row_max(z, lanes));
  for (int64_t i = 0; i < lanes; ++i) s[i] = Kind::value(z[i], largest);
  const float sum = row_sum(s, lanes);
  for (int64_t i = 0; i < lanes; ++i) s[i] /= sum;
  return sum != 0.0f;
}
inline bool score_row(uint32_t score, const float* z, int64_t lanes, float* s) {
  bool chooses = false;
  math::Scores::with(score, [&]<class Kind>() {
    if constexpr (Kind::kInfo.over_row)
      chooses = score_whole_row<Kind>(z, lanes, s);
    else
      chooses = score_lanes<Kind>(z, lanes, s);
  });
  return chooses;
}

// R4. bias may be null; the padding is never chosen.
inline void rank_row(const float* s, const float* bias, int64_t columns, int64_t* keys) {
  if (bias)
    for (int64_t i = 0; i < columns; ++i) keys[i] = math::rank_key(s[i] + bias[i], int32_t(i));
  else
    for (int64_t i = 0; i < columns; ++i) keys[i] = math::rank_key(s[i], int32_t(i));
  for (int64_t i = columns; i < padded_columns(columns); ++i) keys[i] = math::kNoKey;
}

// The largest of 16 keys that is below `below`; kNoKey when there is none. The compiler does not
// vectorise a conditional maximum by itself, hence the vector type.
inline constexpr int64_t kKeyBlock = 16;
inline int64_t next_in_block(const int64_t* keys, int64_t below) {
  using Keys = int64_t __attribute__((vector_size(32)));
  const Keys none = Keys{} + math::kNoKey, limit = Keys{} + below;
  Keys best[4];
  std::memcpy(best, keys, sizeof best);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) best[i] = best[i] < limit ? best[i] : none;
  best[0] = best[0] > best[1] ? best[0] : best[1];
  best[2] = best[2] > best[3] ? best[2] : best[3];
  best[0] = best[0] > best[2] ? best[0] : best[2];
  const int64_t low = best[0][0] > best[0][1] ? best[0][0] : best[0][1];
  const int64_t high = best[0][2] > best[0][3] ? best[0][2] : best[0][3];
  return low > high ? low : high;
}

// The same over any number of keys.
inline int64_t next_key(const int64_t* keys, int64_t count, int64_t below) {
  int64_t best = math::kNoKey, i = 0;
  for (; i + kKeyBlock <= count; i += kKeyBlock) {
    const int64_t key = next_in_block(keys + i, below);
    best = key > best ? key : best;
  }
  for (; i < count; ++i) {
    const int64_t key = keys[i] < below ? keys[i] : math::kNoKey;
    best = key > best ? key : best;
  }
  return best;
}

// The first `count` ids in order; -1 for those that are not selectable. best: scratch of
// key_blocks(lanes), the best key left in each block. No branch depends on the data.
inline int64_t key_blocks(int64_t lanes) {
  return int64_t(round_up(uint64_t(lanes / kKeyBlock), uint64_t(kKeyBlock)));
}
inline void take_best(const int64_t* keys, int64_t lanes, int32_t count, int64_t* best,
                      int32_t* ids) {
  const int64_t blocks = lanes / kKeyBlock, padded = key_blocks(lanes);
  for (int64_t b = 0; b < blocks; ++b) best[b] = next_in_block(keys + b * kKeyBlock, INT64_MAX);
  std::fill(best + blocks, best + padded, math::kNoKey);
  for (int32_t k = 0; k < count; ++k) {
    const int64_t key = next_key(best, padded, INT64_MAX);
    ids[k] = math::is_selectable_key(key) ? math::key_id(key) : -1;
    if (key == math::kNoKey) continue;
    const int64_t block = math::key_id(key) / kKeyBlock;
    best[block] = next_in_block(keys + block * kKeyBlock, key);
  }
}

// R5: experts outside the best groups get the fill value. group_keys: scratch [num_groups].
inline void limit_groups(const moec_router_desc& desc, int64_t columns, int64_t* keys,
                         int64_t* group_keys) {
  const int64_t size = columns / desc.num_groups;
  const int64_t best = std::min<int64_t>(std::max(desc.group_top_m, 1), size);
  for (int32_t g = 0; g < desc.num_groups; ++g) {
    int64_t below = INT64_MAX;
    float sum = 0.0f;
    for (int64_t m = 0; m < best; ++m) {
      below = next_key(keys + g * size, size, below);
      sum += math::key_value(below);
    }
    group_keys[g] = math::rank_key(sum, g);
  }
  int64_t last = INT64_MAX;  // key of the worst group that is kept
  for (int32_t i = 0; i < desc.top_groups; ++i) last = next_key(group_keys, desc.num_groups, last);
  const float fill = desc.group_fill == MOEC_FILL_ZERO ? 0.0f : -INFINITY;
  for (int32_t g = 0; g < desc.num_groups; ++g) {
    if (group_keys[g] >= last) continue;
    for (int64_t i = g * size; i < (g + 1) * size; ++i) keys[i] = math::rank_key(fill, int32_t(i));
  }
}

// One step of the sparse mixer: the best logit but for column `taken` (-1: none), and the softmax p
// over the logits near it; p is 0 elsewhere. id -1: nobody is left.
struct MixerStep {
  int32_t id;
  float weight;
};
inline MixerStep mixer_step(float eps, const float* z, int64_t columns, int32_t taken, float* p) {
  const int64_t lanes = padded_columns(columns);
  int64_t best = math::kNoKey;
  for (int64_t i = 0; i < columns; ++i) {
    const int64_t key = math::rank_key(z[i], int32_t(i));
    if (i != taken && key > best) best = key;
  }
  std::memset(p, 0, size_t(lanes) * sizeof *p);
  if (!math::is_selectable_key(best)) return {-1, 0.0f};
  const int32_t id = math::key_id(best);
  const float largest = z[id];
  for (int64_t i = 0; i < columns; ++i)
    if (i != taken && math::is_selectable(z[i]) && math::mixer_keeps(z[i], largest, eps))
      p[i] = math::exp(z[i] - largest);
  const float sum = row_sum(p, lanes);
  for (int64_t i = 0; i < lanes; ++i) p[i] /= sum;
  return {id, p[id]};
}

// Sums made by chunk: d [width] (+)= sum over chunks of partial [chunks, width].
inline void store_sum(const float* partial, int64_t chunks, int64_t width, const Array& d,
                      bool accumulate) {
  for (int64_t i = 0; i < width; ++i) {
    float sum = accumulate ? load_real(d.data, d.dtype, i) : 0.0f;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += partial[chunk * width + i];
    store_real(d.data, d.dtype, i, sum);
  }
}

inline int64_t load_id(const Array& ids, int64_t index) {
  return load_integer(ids.data, ids.dtype, index);
}

}  // namespace moec::cpu
