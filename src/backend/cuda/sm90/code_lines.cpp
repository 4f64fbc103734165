// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/code_lines.h"

#include <bit>

namespace moec::cuda {
namespace {

// The exponent of a block's extent along an axis, or -1.
int shift_of(const quant::BlockSize& block) {
  constexpr int kAll = 31;  // positions are fewer
  if (block.is_all()) return kAll;
  const auto size = uint64_t(block.size());
  return std::has_single_bit(size) ? std::countr_zero(size) : -1;
}

const char* set_nested(NestedScales& to, const ExpertMatrix& m) {
  if (!m.scale_book) return nullptr;
  if (!m.expert_codes && m.scales2.expert_stride) return "nested scales that experts do not share";
  to = {m.scale_book, static_cast<const float*>(m.scales2.base),
        static_cast<const float*>(m.scale_offset.base), shift_of(m.scale_block)};
  return to.shift < 0 ? "nested scales in blocks that are no power of two" : nullptr;
}

}  // namespace

const char* set_lines(CodedLines& to, int part, const ExpertMatrix& m, bool alternating) {
  if (m.zeros.array.present()) return "zero points";
  if (m.group_index.present()) return "a group index";
  if (m.scheme == MOEC_SCHEME_FP8 && m.values.dtype != MOEC_F8_E4M3) return "codes of e5m2";
  const bool along_k = m.col_stride == 1;
  const bool stream = quant::find_format(m.scheme)->storage == quant::Storage::kStream;
  const quant::BlockSize& along = along_k || stream ? m.scales.block_k : m.scales.block_n;
  ExpertScales& scales = to.scales[part];
  scales.base = m.scales.array.base;
  scales.dtype = m.scales.array.dtype;
  scales.first_line = along_k ? int(m.rows.first) : 0;
  scales.line_step = along_k ? int(m.rows.step) : 1;
  scales.first = along_k || alternating ? 0 : int(m.rows.first);
  scales.shift = shift_of(along);
  if (scales.shift < std::countr_zero(unsigned(kLineRun)) || scales.first % kLineRun != 0)
    return "blocks that are not whole runs of 32";
  if (stream) {
    const int64_t line = along_k ? m.row_stride : m.col_stride;
    if (line % along.size() != 0) return "blocks that do not end with rows";
    scales.line_stride = int(line / along.size());
    scales.expert_stride =
        m.expert_codes ? m.expert_codes / along.size() : m.scales.array.expert_stride;
    scales.line_shift = 0;
  } else {
    if ((along_k ? m.scales.col_stride : m.scales.row_stride) != 1)
      return "scales of another orientation";
    scales.line_stride = int(along_k ? m.scales.row_stride : m.scales.col_stride);
    scales.expert_stride = m.scales.array.expert_stride;
    scales.line_shift = shift_of(along_k ? m.scales.block_n : m.scales.block_k);
    if (scales.line_shift < 0) return "blocks whose extent is no power of two";
  }
  to.codebooks[part] = m.codebook;
  return set_nested(to.nested[part], m);
}

void set_decode(CodedLines& to, const ExpertMatrix& m) {
  to = {};
  if (!has_lines(m.scheme)) to.decode = LineDecode::kSigned;
  LineFormats::with(m.scheme, [&]<class Format>() {
    if constexpr (requires { Format::nibble_of(0); }) {
      to.decode = LineDecode::kTable;
      to.high_first = Format::nibble_of(0) == 1;
    } else {
      to.decode = LineDecode::kBytes;
    }
    if constexpr (std::is_same_v<Format, quant::Mxfp4>) {
      if (m.dtype == MOEC_BF16) to.decode = LineDecode::kPowers;
    }
    if constexpr (std::is_same_v<Format, quant::Int4>) {
      if (m.scales.array.dtype == m.dtype) to.decode = LineDecode::kIntegers;
    }
    for (uint32_t code = 0; code < 16; ++code) {
      if constexpr (std::is_same_v<Format, quant::Mxfp4>) to.numbers[code] = quant::e2m1(code);
      if constexpr (std::is_same_v<Format, quant::Int4>) to.numbers[code] = float(code) - 8;
    }
  });
}

}  // namespace moec::cuda
