// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/row_gemm_problem.h"

#include <bit>
#include <initializer_list>

namespace moec::cuda {
namespace {

bool follows(const ExpertArray& second, const ExpertArray& first) {
  return first.base && second.base == static_cast<char*>(first.base) + dtype_bytes(first.dtype);
}

bool same_entries(const ExpertBlocks& a, const ExpertBlocks& b) {
  return a.array.present() == b.array.present() && a.array.dtype == b.array.dtype &&
         a.row_stride == b.row_stride && a.array.expert_stride == b.array.expert_stride;
}

const char* check_alike(const ExpertMatrix& a, const ExpertMatrix& b) {
  if (a.row_stride != b.row_stride || a.col_stride != b.col_stride ||
      a.values.expert_stride != b.values.expert_stride)
    return "gate and up of different layouts";
  if (a.scheme != b.scheme || a.values.dtype != b.values.dtype ||
      !same_entries(a.scales, b.scales) || !same_entries(a.zeros, b.zeros))
    return "gate and up of different formats";
  return nullptr;
}

const char* check_matrix(const ExpertMatrix& m, moec_dtype dtype) {
  if (m.values.pointers) return "experts that are separate tensors";
  if (m.scales.array.pointers || m.zeros.array.pointers) return "scales that are separate tensors";
  if (m.dtype != dtype || m.is_rounded()) return "weights of another type than x";
  if (m.is_coded() && !row_gemm_decodes(*quant::find_format(m.scheme)))
    return "quantised weights of this format";
  const bool of_channels = m.is_coded() && !has_lines(m.scheme);
  if (of_channels && !quant::is_channels(m.scales.block_n, m.scales.block_k))
    return "quantised weights with other blocks than channels";
  return nullptr;
}

const char* check_bias(const ExpertMatrix& m, moec_dtype dtype) {
  if (m.bias.pointers) return "biases that are separate tensors";
  if (m.has_bias() && m.bias.dtype != MOEC_F32 && m.bias.dtype != dtype)
    return "biases of this type";
  return nullptr;
}

// Entries of the matrix's own rows, from the first one on.
ExpertBlocks own_rows(ExpertBlocks blocks, const quant::RowMap& rows) {
  blocks.array = blocks.array.from(rows.first * blocks.row_stride);
  blocks.row_stride *= rows.step;
  return blocks;
}
// The matrix as one of its own rows: nibbles as plain codes from their first byte on.
ExpertMatrix in_own_rows(ExpertMatrix m) {
  if (!m.is_coded()) return m;
  if (!has_lines(m.scheme)) {
    m.scales = own_rows(m.scales, m.rows);
    m.zeros = own_rows(m.zeros, m.rows);
  } else if (const int each = codes_in_byte(m.scheme); each > 1) {
    const int64_t bytes = m.values.expert_stride * dtype_bytes(m.values.dtype);
    m.values.base = static_cast<char*>(m.values.base) + m.rows.first * m.row_stride / each;
    m.values.expert_stride = m.expert_codes ? m.expert_codes : bytes * each;
    m.values.dtype = MOEC_U8;
    m.row_stride *= m.rows.step;
  }
  return m;
}

ChannelArray channel_array(const ExpertBlocks& blocks, bool alternating) {
  if (!blocks.array.present()) return {};
  return {blocks.array.base, blocks.array.expert_stride,
          alternating ? blocks.row_stride / 2 : blocks.row_stride, blocks.array.dtype};
}

// The exponent of a block's extent along an axis, or -1.
int shift_of(const quant::BlockSize& block) {
  constexpr int kAll = 31;  // positions are fewer
  if (block.is_all()) return kAll;
  const auto size = uint64_t(block.size());
  return std::has_single_bit(size) ? std::countr_zero(size) : -1;
}

const char* set_nested(NestedScales& to, const ExpertMatrix& m) {
  if (!m.scale_book) return nullptr;
  to = {m.scale_book, static_cast<const float*>(m.scales2.base),
        static_cast<const float*>(m.scale_offset.base), shift_of(m.scale_block)};
  return to.shift < 0 ? "nested scales in blocks that are no power of two" : nullptr;
}

// Lines and scales of a matrix, of which `part` is one; alternating: and of the next one, too.
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
    scales.expert_stride = m.expert_codes / along.size();
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

// How elements of a type are made of these codes.
void set_decode(CodedLines& to, const ExpertMatrix& m) {
  to = {};
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

ExpertBias bias_of(const ExpertMatrix& m) {
  if (!m.has_bias()) return {};
  return {m.bias.base, m.bias.expert_stride, m.bias_stride, m.bias.dtype == MOEC_F32};
}

}  // namespace

bool columns_alternate(const ExpertMatrix& gate, const ExpertMatrix& up) {
  if (has_lines(gate.scheme) && codes_in_byte(gate.scheme) > 1) {
    return up.scheme == gate.scheme && gate.row_stride == 1 && gate.col_stride > 1 &&
           gate.rows.step == 2 && gate.rows.first == 0 && up.rows.step == 2 && up.rows.first == 1 &&
           gate.values.base == up.values.base;
  }
  return gate.row_stride == 2 && up.row_stride == 2 && gate.col_stride > 1 &&
         follows(up.values, gate.values);
}

const char* set_matrices(RowGemmProblem& p, int64_t n, int64_t k, const ExpertMatrix& given,
                         const ExpertMatrix* given_second) {
  const ExpertMatrix first = in_own_rows(given);
  const ExpertMatrix other = given_second ? in_own_rows(*given_second) : ExpertMatrix();
  const ExpertMatrix* const second = given_second ? &other : nullptr;
  for (const ExpertMatrix* m : {&first, second}) {
    if (!m) continue;
    if (const char* why = check_matrix(*m, p.dtype)) return why;
    // That of down is read for the routing weights' gradient; kGradUp needs none.
    if (const char* why = p.op == RowGemm::kGradUp ? nullptr : check_bias(*m, p.dtype)) return why;
  }
  if (const char* why = second ? check_alike(first, *second) : nullptr) return why;
  if (p.op == RowGemm::kUp && second && first.has_bias() != second->has_bias())
    return "a bias of only one of gate and up";
  const bool alternating = second && columns_alternate(given, *given_second);
  const bool k_contiguous = first.col_stride == 1, gradient = is_gradient(p.op);
  if (!k_contiguous && first.row_stride != 1 && !alternating)
    return "columns that are not contiguous";
  const bool lines = has_lines(first.scheme);
  if (lines) {
    set_decode(p.lines, given);
    if (const char* why = set_lines(p.lines, 0, given, alternating)) return why;
    if (const char* why = second ? set_lines(p.lines, 1, *given_second, alternating) : nullptr)
      return why;
  } else if (first.is_coded()) {
    p.lines.decode = LineDecode::kSigned;
  }
  if (alternating && first.is_coded() && !lines &&
      !(follows(second->scales.array, first.scales.array) && first.scales.row_stride % 2 == 0 &&
        (!first.zeros.array.present() ||
         (follows(second->zeros.array, first.zeros.array) && first.zeros.row_stride % 2 == 0))))
    return "scales that do not alternate as the columns of gate and up do";

  const int64_t contraction = alternating && gradient ? 2 * n : n;
  p.features = gradient ? k : n;
  p.k_size = gradient ? contraction : k;
  p.parts = gradient && second && !alternating ? 2 : 1;
  if (second) p.alternating = alternating;
  p.weights_mn_major = k_contiguous == gradient;
  p.weight_stride = k_contiguous ? first.row_stride : first.col_stride;
  p.expert_stride = first.values.expert_stride;
  p.scheme = first.scheme;
  for (int part = 0; part < (second ? 2 : 1); ++part) {
    const ExpertMatrix& m = part ? *second : first;
    p.weights[part] = m.values.base;
    if (!lines) {
      p.channels[part] = {channel_array(m.scales, alternating),
                          channel_array(m.zeros, alternating)};
    }
    if (!gradient) p.bias[part] = bias_of(m);
  }
  return nullptr;
}

const char* set_factors(RowGemmProblem& p, int64_t rank, const void* narrow,
                        const ExpertMatrix& first, const ExpertMatrix* second) {
  const bool gradient = is_gradient(p.op), in_turn = p.alternating && p.op == RowGemm::kUp;
  for (const ExpertMatrix* m : {&first, second}) {
    if (!m) continue;
    if (!m->present()) return "an adapter of only one of gate and up";
    if (m->dtype != p.dtype || m->is_rounded()) return "factors of another type than x";
  }
  if (const char* why = second ? check_alike(first, *second) : nullptr) return why;
  if (in_turn && !(second && columns_alternate(first, *second)))
    return "factors that do not alternate as the columns of gate and up do";
  const bool along_k = first.col_stride == 1;  // of a factor [n,k]
  if (!along_k && first.row_stride != 1 && !in_turn) return "factors that are not contiguous";
  if ((along_k == gradient) != p.weights_mn_major) return "factors that lie across the weights";
  p.rank = rank;
  p.narrow = narrow;
  p.factors[0] = first.values.base;
  p.factors[1] = second ? second->values.base : nullptr;
  p.factor_stride = along_k ? first.row_stride : first.col_stride;
  p.factor_expert_stride = first.values.expert_stride;
  return nullptr;
}

}  // namespace moec::cuda
