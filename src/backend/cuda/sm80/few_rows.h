// SPDX-License-Identifier: Apache-2.0
// Row products of coded matrices whose experts have few rows: few_lines.cu, few_rows.cu.
#pragma once

#include "backend/cuda/sm80/row_product_params.h"
#include "quant/format.h"

namespace moec::cuda {

// Whether codes lie along n, that is, across k; else along k.
inline bool is_across(const PortableGemm& p) {
  return p.b[0].k_stride != 1;
}
// Features of a tile, and codes of a lane's piece, which lie side by side.
constexpr MOEC_HD int few_features(bool across, bool nibbles) {
  return across && nibbles ? 128 : 64;
}
constexpr MOEC_HD int few_piece(bool across, bool nibbles) {
  return (across ? 8 : 16) << nibbles;
}
// How codes lie, and what follows for a CTA: its rows, and its features of the matrix.
template <bool kAcross>
struct FewForm {
  static constexpr bool across = kAcross;
  bool nibbles;
  int shift;

  MOEC_HD explicit FewForm(const PortableGemm& p) {
    const uint32_t scheme = p.codes[0].quant.scheme;
    nibbles = scheme != MOEC_SCHEME_INT8 && scheme != MOEC_SCHEME_FP8;
    shift = across ? 0 : nibbles ? 2 : 1;
  }
  MOEC_HD int rows() const { return across ? 8 : 16; }
  MOEC_HD int features() const { return few_features(across, nibbles); }
  MOEC_HD int piece() const { return few_piece(across, nibbles); }
  // The unit in which kernels count k: a byte of codes, or half a row of them.
  MOEC_HD int units(int k) const { return k * 2 >> shift; }
  MOEC_HD int k_of(int units) const { return (units << shift) / 2; }
};

// The pitch of rows of codes in memory, and the first byte of the expert's, of n 0. Nibbles lie in
// rows of the bound matrix; others have their own.
template <class Form>
MOEC_HD int64_t few_pitch(const Operand& b, const OperandCodes& codes, Form form) {
  const int64_t pitch = form.across ? b.k_stride : b.i_stride;
  if (!form.nibbles) return pitch;
  return (form.across == codes.transposed ? pitch * codes.quant.rows.step : pitch) / 2;
}
template <class Form>
MOEC_HD const char* few_codes(const Operand& b, const OperandCodes& codes, int group, Form form) {
  const char* const first = b.of_group(group);
  if (!form.nibbles) return first;
  const int64_t line = codes.transposed ? b.k_stride : b.i_stride;
  return first + (group * codes.quant.expert_codes + codes.quant.rows.first * line) / 2;
}

// Formats that the kernel has.
using FewRowsFormats =
    quant::FormatList<quant::Int8, quant::Fp8, quant::Codebook4, quant::Mxfp4, quant::Int4>;

// Rows and features of a tile; its depth is bytes.
inline const char* few_tile(const PortableGemm& p) {
  return !is_across(p) ? "16x64" : FewForm<true>(p).nibbles ? "8x128" : "8x64";
}

// A function of the problem alone. aligned: as mma_takes has it.
bool few_rows_takes(const PortableGemm& gemm, bool aligned);
void few_rows_product(const Op& op, const PortableGemm& gemm);
void few_lines_product(const Op& op, const PortableGemm& gemm);  // of codes along k

}  // namespace moec::cuda
