// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/coded_lines.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

namespace moec::cpu {
namespace {

using quant::CodedView;

constexpr float kE2m1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
constexpr float kIntegers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr float kSigned[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

bool has_runs(const quant::BlockSize& block) {
  return block.is_all() || block.size() % kCodesAlign == 0;
}

int64_t bytes_of(ScaleType type) {
  return type == ScaleType::kF32 ? 4 : type == ScaleType::kPower ? 1 : 2;
}

// Of what the next lines have: it lies behind that of these.
void ask_for(const char* from, int64_t bytes) {
  constexpr int64_t kCacheLine = 64;
  for (int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(from + i, 0, 2);
}

}  // namespace

void CodedLines::find_scales(float least, float most) {
  least_scale_ = 0x1p-125f / least;
  most_scale_ = 0x1p109f / most;
}

bool CodedLines::find(const CodedView& m, moec_dtype dtype) {
  if (dtype == MOEC_F32) return false;
  m_ = &m;
  along_k_ = m.col_stride == 1;
  block_ = m.scales.block_k;
  plain_scales_ = is_real(m.scales.dtype) && !m.scale_book;
  const auto bytes = [&](LineCodes codes) {
    codes_ = codes;
    first_ = static_cast<const uint8_t*>(m.codes);
    stride_ = m.row_stride;
    return along_k_ && has_runs(block_);
  };
  // Lines of nibbles, from that of element (0, 0) on.
  const auto nibbles = [&](LineCodes codes, const float* numbers, int64_t place, int64_t stride) {
    codes_ = codes;
    numbers_ = numbers;
    first_ = static_cast<const uint8_t*>(m.codes) + place / 2;
    stride_ = stride / 2;
    return has_runs(block_) && place % 2 == 0 && stride % 2 == 0;
  };
  const int64_t rows_apart = m.row_stride * m.rows.step;
  switch (m.scheme) {
    case MOEC_SCHEME_INT8:
      find_scales(1, 128);
      has_zeros_ = bool(m.zeros);
      return bytes(LineCodes::kI8);
    case MOEC_SCHEME_FP8:
      find_scales(0x1p-9f, 448);
      return m.code_dtype == MOEC_F8_E4M3 && bytes(LineCodes::kE4m3);
    case MOEC_SCHEME_INT4:
      find_scales(1, 15);
      has_zeros_ = bool(m.zeros);
      return along_k_ && !m.group_index &&
             nibbles(LineCodes::kLowNibble, m.zeros ? kIntegers : kSigned,
                     m.rows.first * m.row_stride, rows_apart);
    case MOEC_SCHEME_MXFP4: {
      find_scales(0.5f, 6);
      exact_ = dtype == MOEC_BF16;
      if (!along_k_) block_ = m.scales.block_n;
      const bool whole = along_k_ || (m.rows.step == 1 && m.rows.first % kCodesAlign == 0);
      return whole && nibbles(LineCodes::kLowNibble, kE2m1, quant::Mxfp4::place(m, 0, 0),
                              along_k_ ? rows_apart : m.col_stride);
    }
    case MOEC_SCHEME_CODEBOOK4: {
      float least = 1, most = 1;
      for (int i = 0; i < 16; ++i) {
        const float number = std::abs(m.codebook[i]);
        if (number > 0) least = std::min(least, number);
        most = std::max(most, number <= FLT_MAX ? number : INFINITY);
      }
      find_scales(least, most);
      const int64_t place = quant::Codebook4::place(m, 0, 0);
      const int64_t stride = along_k_ ? rows_apart : m.col_stride;
      const bool whole = place % block_.size() == 0 && stride % block_.size() == 0;
      return whole && (along_k_ || m.rows.step == 1) &&
             nibbles(LineCodes::kHighNibble, m.codebook, place, stride);
    }
    default:
      return false;
  }
}

CodedLines::Scales CodedLines::scales_in_place(int64_t line, int64_t block) const {
  const CodedView& m = *m_;
  const bool powers = m.scheme == MOEC_SCHEME_MXFP4, stream = m.scheme == MOEC_SCHEME_CODEBOOK4;
  const bool in_order = stream || (along_k_ && (m.scales.col_stride == 1 || block_.is_all()));
  if (m.zeros || !in_order || !(powers || plain_scales_)) return {nullptr, ScaleType::kF32};
  const int64_t at = block * block_.size(), n = n_of(line, at), k = k_of(line, at);
  const int64_t entry = stream ? quant::Codebook4::entry(m, n, k) : m.scales.at(m.rows.of(n), k);
  const auto* const from = static_cast<const char*>(m.scales.data);
  if (powers) return {from + entry, ScaleType::kPower};
  return {from + entry * dtype_bytes(m.scales.dtype), m.scales.dtype == MOEC_F32 ? ScaleType::kF32
                                                      : m.scales.dtype == MOEC_BF16
                                                          ? ScaleType::kBf16
                                                          : ScaleType::kF16};
}

void CodedLines::fill(int64_t line, int64_t block0, int64_t blocks, float* scales,
                      float* zeros) const {
  quant::Formats::with(m_->scheme, [&]<class Format>() {
    if constexpr (requires(typename Format::Block block) { block.scale; })
      for (int64_t i = 0; i < blocks; ++i) {
        const int64_t at = (block0 + i) * block_.size();
        const auto block = Format::block(*m_, n_of(line, at), k_of(line, at));
        scales[i] = block.scale;
        if constexpr (requires { block.zero; })
          if (zeros) zeros[i] = block.zero;
      }
  });
}

bool CodedLines::are_apart_evenly(int64_t line, int lines) const {
  if (lines == 1 || m_->scheme == MOEC_SCHEME_CODEBOOK4) return true;
  const quant::BlockSize& rows = m_->scales.block_n;
  const auto row = [&](int64_t at) { return rows.of(m_->rows.of(n_of(at, 0))); };
  return along_k_ && (rows.size() == 1 || row(line) == row(line + lines - 1));
}

CodedRun CodedLines::runs(const TileKernels& tile, int64_t line, int lines, int64_t first,
                          int64_t count, float* scales, float* zeros, int64_t& apart) const {
  const int64_t block0 = block_.of(first), blocks = blocks_of(first, count);
  const Scales at = scales_in_place(line, block0);
  const auto convert = [&](const void* from, int64_t number, float* to) {
    if (at.type == ScaleType::kPower)
      tile.powers_to_f32(static_cast<const uint8_t*>(from), to, number);
    else
      tile.to_f32[int(at.type)](from, to, number);
  };
  const auto from = [&](int64_t i) {
    return static_cast<const char*>(scales_in_place(line + i, block0).from);
  };
  const float* found = scales;
  apart = blocks;
  if (!at.from) {
    for (int64_t i = 0; i < lines; ++i)
      fill(line + i, block0, blocks, scales + i * blocks, zeros ? zeros + i * blocks : nullptr);
  } else {
    const bool evenly = are_apart_evenly(line, lines), in_place = at.type == ScaleType::kF32;
    const int64_t step = evenly && lines > 1 ? (from(1) - from(0)) / bytes_of(at.type) : 0;
    if (evenly && (in_place || step == blocks || step == 0)) {
      apart = step;
      if (lines > 1)
        ask_for(from(lines - 1) + bytes_of(at.type) * step, lines * step * bytes_of(at.type));
      if (in_place)
        found = static_cast<const float*>(at.from);
      else
        convert(at.from, step ? lines * blocks : blocks, scales);
    } else {
      for (int64_t i = 0; i < lines; ++i) convert(from(i), blocks, scales + i * blocks);
    }
  }
  return {first_ + line * stride_,      first,  count,  numbers_,     found,
          has_zeros_ ? zeros : nullptr, block_, exact_, least_scale_, most_scale_};
}

CodedRun CodedLines::run(const TileKernels& tile, int64_t line, int64_t first, int64_t count,
                         float* scales, float* zeros) const {
  int64_t apart;
  return runs(tile, line, 1, first, count, scales, zeros, apart);
}

bool CodedLines::decode_columns(const TileKernels& tile, int64_t line, int columns, int64_t first,
                                int64_t count, char* to, int64_t block_stride) const {
  constexpr int64_t kBlocks = kMostColumnRun / kCodesAlign + 1;
  const int64_t block0 = block_.of(first), blocks = blocks_of(first, count);
  float filled[kLanes][kBlocks];
  const void* scales[kLanes];
  ScaleType type = ScaleType::kF32;
  for (int i = 0; i < columns; ++i) {
    const Scales own = scales_in_place(line + i, block0);
    scales[i] = own.from ? own.from : filled[i];
    type = own.type;
    if (!own.from) fill(line + i, block0, blocks, filled[i], nullptr);
  }
  const int64_t ends = block_.is_all() ? count : (block0 + 1) * block_.size() - first;
  return tile.decode_columns[int(codes_)]({at(line, first), stride_, columns, count, numbers_,
                                           scales, type, ends, block_.size(), exact_, least_scale_,
                                           most_scale_, to, block_stride});
}

}  // namespace moec::cpu
