// SPDX-License-Identifier: Apache-2.0
// The work of a quantisation, cut into tiles that share a scale, for host and device. A team works
// on a tile: one thread of the CPU, or a warp or CTA. The type of the values is found as they are
// read: the rule takes the time, and one body of a rule serves all types.
//
//   team.rank, team.size   this thread, of how many
//   team.all(spread)       the spread of what all of them saw
#pragma once

#include "core/chunks.h"
#include "core/dtype.h"
#include "quant/quantise_rules.h"

namespace moec::quant {

// A matrix [N,K] of each expert. A flat stream is one row of one expert.
struct QuantiseView {
  const void* source = nullptr;
  moec_dtype dtype = 0;
  int64_t num_experts = 0, rows = 0, cols = 0;  // E, N, K
  int64_t row_stride = 0, col_stride = 0;       // elements of source
  int64_t block_n = 0, block_k = 0;             // of a tile
  bool expert_scale = false;                    // one scale an expert, of many tiles
  uint8_t* codes = nullptr;                     // [E,N,code_row_bytes]
  int64_t code_row_bytes = 0;
  void* scales = nullptr;      // one a tile, or one an expert
  moec_dtype scale_dtype = 0;  // a real one, or of a byte
  float* scales2 = nullptr;    // [E], of rules with kOfExpert
  int8_t* zeros = nullptr;     // one a tile; null: there are none
  // [E,expert_chunks.count] Spread::bits of parts of an expert; null: not asked for
  const uint32_t* expert_bits = nullptr;
  Chunks expert_chunks{0, 1};  // of N * K

  MOEC_HD float value(int64_t at) const { return load_real(source, dtype, at); }
  MOEC_HD int64_t tiles_k() const { return (cols + block_k - 1) / block_k; }
  MOEC_HD int64_t expert_tiles() const { return (rows + block_n - 1) / block_n * tiles_k(); }
  MOEC_HD int64_t tiles() const { return num_experts * expert_tiles(); }
};

// Entry `chunk` of expert_bits, of all experts one after the other.
template <class Team>
MOEC_HD void expert_chunk(const QuantiseView& v, uint32_t* bits, int64_t chunk, const Team& team) {
  const Chunks& chunks = v.expert_chunks;
  const int64_t e = chunk / chunks.count, c = chunk - e * chunks.count;
  const int64_t first = e * v.rows * v.cols, begin = c * chunks.length;
  const int64_t after = begin + chunks.length;
  const int64_t end = after < chunks.items ? after : chunks.items;
  Spread spread;
  for (int64_t i = begin + team.rank; i < end; i += team.size) spread.add(v.value(first + i));
  spread = team.all(spread);
  if (team.rank == 0) bits[chunk] = spread.bits;
}

template <class Rule, class Team>
MOEC_HD void quantise_tile(const Rule& rule, const QuantiseView& v, int64_t tile,
                           const Team& team) {
  constexpr int kEach = 8 / Rule::kCodeBits;  // codes of a byte
  const int64_t tiles_k = v.tiles_k(), e = tile / v.expert_tiles(),
                inside = tile - e * v.expert_tiles();
  const int64_t row = inside / tiles_k * v.block_n, col = inside % tiles_k * v.block_k;
  const int64_t rows = row + v.block_n < v.rows ? v.block_n : v.rows - row;
  const bool last = col + v.block_k >= v.cols;
  const int64_t cols = last ? v.cols - col : v.block_k;
  const int64_t first = e * v.rows * v.cols + row * v.row_stride + col * v.col_stride;
  const auto value = [&](int64_t n, int64_t k) {
    return v.value(first + n * v.row_stride + k * v.col_stride);
  };
  Spread spread, expert;
  if (v.expert_bits) {
    const uint32_t* const bits = v.expert_bits + e * v.expert_chunks.count;
    for (int64_t i = team.rank; i < v.expert_chunks.count; i += team.size)
      expert.bits = bits[i] > expert.bits ? bits[i] : expert.bits;
    expert = team.all(expert);
  }
  if (v.expert_scale) {
    spread = expert;
  } else {
    for (int64_t i = team.rank; i < rows * cols; i += team.size) {
      const int64_t n = rows == 1 ? 0 : i / cols;
      spread.add(value(n, i - n * cols));
    }
    spread = team.all(spread);
  }
  const ScaledBlock block = rule.block(spread, expert);
  if (team.rank == 0) {
    const bool leads = inside == 0;  // its expert
    const int64_t at = v.expert_scale ? e : tile;
    if (!v.expert_scale || leads) {
      if (is_real(v.scale_dtype))
        store_real(v.scales, v.scale_dtype, at, block.scale);
      else
        static_cast<uint8_t*>(v.scales)[at] = block.byte;
    }
    if (v.zeros) v.zeros[tile] = int8_t(block.zero);
    if constexpr (Rule::kOfExpert)
      if (leads) v.scales2[e] = rule.expert_scale(expert);
  }
  const int64_t begin = col / kEach,
                bytes = (last ? v.code_row_bytes : (col + cols) / kEach) - begin;
  uint8_t* const to = v.codes + (e * v.rows + row) * v.code_row_bytes + begin;
  for (int64_t i = team.rank; i < rows * bytes; i += team.size) {
    const int64_t n = rows == 1 ? 0 : i / bytes, byte = i - n * bytes;
    uint32_t codes = 0;
    for (int j = 0; j < kEach; ++j) {
      const int64_t k = byte * kEach + j;
      const uint32_t code =
          k < cols ? rule.code(block.finite ? value(n, k) : 0.0f, block) : rule.padding();
      codes |= code << Rule::kCodeBits * (Rule::kHighFirst ? kEach - 1 - j : j);
    }
    to[n * v.code_row_bytes + byte] = uint8_t(codes);
  }
}

// ---- nested statistics: scales as bytes of the dynamic map, in groups, after their mean is gone
inline constexpr int64_t kNestedGroup = 256;
struct NestedView {
  const float* scales = nullptr;  // [count]
  int64_t count = 0;
  double* sums = nullptr;    // [groups()]: of each group
  float* offset = nullptr;   // [1]: the mean
  float* scales2 = nullptr;  // [groups()]
  uint8_t* codes = nullptr;  // [count]
  float* map = nullptr;      // [256]
  Chunks chunks{0, 1};       // of the groups
  MOEC_HD int64_t groups() const { return (count + kNestedGroup - 1) / kNestedGroup; }
  MOEC_HD int64_t end(int64_t group) const {
    return (group + 1) * kNestedGroup < count ? (group + 1) * kNestedGroup : count;
  }
};
template <class T>
MOEC_HD double sum_of(const T* from, int64_t begin, int64_t end) {
  double sum = 0;
  for (int64_t i = begin; i < end; ++i) sum += from[i];
  return sum;
}
MOEC_HD void sum_group(const NestedView& v, int64_t group) {
  v.sums[group] = sum_of(v.scales, group * kNestedGroup, v.end(group));
}
MOEC_HD double sum_chunk(const NestedView& v, int64_t chunk) {
  const int64_t begin = chunk * v.chunks.length, after = begin + v.chunks.length;
  return sum_of(v.sums, begin, after < v.chunks.items ? after : v.chunks.items);
}
MOEC_HD void store_mean(const NestedView& v, const double* chunk_sums) {
  const float mean = float(sum_of(chunk_sums, 0, v.chunks.count) / double(v.count));
  *v.offset = magnitude_bits(mean) < kInfinityBits ? mean : quiet_nan();
}
template <class Team>
MOEC_HD void nested_group(const NestedView& v, const DynamicMap& map, int64_t group,
                          const Team& team) {
  const float offset = *v.offset;
  const int64_t begin = group * kNestedGroup, end = v.end(group);
  Spread spread;
  for (int64_t i = begin + team.rank; i < end; i += team.size) spread.add(v.scales[i] - offset);
  spread = team.all(spread);
  const ScaledBlock block =
      spread.finite() ? ScaledBlock{spread.amax(), spread.bits ? 1.0f / spread.amax() : 0.0f}
                      : spoilt_block(0);
  if (team.rank == 0) v.scales2[group] = block.scale;
  for (int64_t i = begin + team.rank; i < end; i += team.size) {
    const float x = block.finite ? CodebookRule::scaled(v.scales[i] - offset, block) : 0.0f;
    v.codes[i] = uint8_t(dynamic_code(x, [&](uint32_t code) { return map.value[code]; }));
  }
  if (group == 0)
    for (int64_t i = team.rank; i < 256; i += team.size) v.map[i] = map.value[i];
}

// ---- zero points of INT4: eight rows in a word, from [E,N,groups] to [E,ceil(N/8),groups]
struct ZerosView {
  const int8_t* zeros = nullptr;
  int64_t num_experts = 0, rows = 0, groups = 0;
  int32_t* words = nullptr;
  MOEC_HD int64_t word_rows() const { return (rows + 7) / 8; }
  MOEC_HD int64_t count() const { return num_experts * word_rows() * groups; }
};
MOEC_HD void pack_zeros(const ZerosView& v, int64_t word) {
  const int64_t line = word / v.groups, group = word - line * v.groups;
  const int64_t e = line / v.word_rows(), first = (line - e * v.word_rows()) * 8;
  uint32_t packed = 0;
  for (int64_t j = 0; j < 8 && first + j < v.rows; ++j) {
    const int zero = v.zeros[(e * v.rows + first + j) * v.groups + group];
    packed |= uint32_t(zero + 8) << 4 * j;
  }
  v.words[word] = int32_t(packed);
}

}  // namespace moec::quant
