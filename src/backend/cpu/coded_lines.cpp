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

CodedRun CodedLines::run(const TileKernels& tile, int64_t line, int64_t first, int64_t count,
                         float* scales, float* zeros) const {
  const CodedView& m = *m_;
  const int64_t size = block_.size(), block0 = block_.of(first);
  const int64_t blocks = block_.of(first + count - 1) - block0 + 1;
  const auto fill = [&]<class Format>() {
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t at = (block0 + i) * size;
      const auto block = Format::block(m, n_of(line, at), k_of(line, at));
      scales[i] = block.scale;
      if constexpr (requires { block.zero; }) zeros[i] = block.zero;
    }
  };
  // Scales in memory one after the other, and no zero points that differ.
  const bool stream = m.scheme == MOEC_SCHEME_CODEBOOK4;
  const bool in_order = !m.zeros && (stream || (along_k_ && m.scales.col_stride == 1));
  const float* found = scales;
  if (in_order && (plain_scales_ || m.scheme == MOEC_SCHEME_MXFP4)) {
    const int64_t n = n_of(line, block0 * size), k = k_of(line, block0 * size);
    const int64_t at = stream ? quant::Codebook4::entry(m, n, k) : m.scales.at(m.rows.of(n), k);
    const void* const from =
        static_cast<const char*>(m.scales.data) + at * dtype_bytes(m.scales.dtype);
    if (m.scheme == MOEC_SCHEME_MXFP4)
      tile.powers_to_f32(static_cast<const uint8_t*>(from), scales, blocks);
    else if (m.scales.dtype == MOEC_F32)
      found = static_cast<const float*>(from);
    else
      tile.to_f32[m.scales.dtype == MOEC_BF16 ? 1 : 2](from, scales, blocks);
  } else {
    quant::Formats::with(m.scheme, [&]<class Format>() {
      if constexpr (requires(typename Format::Block block) { block.scale; })
        fill.template operator()<Format>();
    });
  }
  return {first_ + line * stride_,      first,  count,  numbers_,     found,
          has_zeros_ ? zeros : nullptr, block_, exact_, least_scale_, most_scale_};
}

}  // namespace moec::cpu
