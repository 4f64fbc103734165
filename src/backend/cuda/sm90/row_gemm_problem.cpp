// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/row_gemm_problem.h"

#include <initializer_list>

#include "backend/cuda/sm90/code_lines.h"

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
  if (first.is_coded()) set_decode(p.lines, given);
  if (lines) {
    if (const char* why = set_lines(p.lines, 0, given, alternating)) return why;
    if (const char* why = second ? set_lines(p.lines, 1, *given_second, alternating) : nullptr)
      return why;
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
