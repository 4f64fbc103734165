// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm80/few_rows.h"

#include <algorithm>

namespace moec::cuda {
namespace {

constexpr int64_t kMostRows = 16;                 // an expert, on average
constexpr int64_t kMostTiles = 65535;             // of a grid along y
constexpr int64_t kMostCodes = int64_t(1) << 31;  // of a matrix: their numbers have 32 bits

bool is_power(const quant::BlockSize& size) {
  return size.is_power() && (size.is_all() || size.size() < kMostCodes);
}

// Whether copies lie at 16 bytes, and a piece has one scale, which shifts find; in streams, whether
// blocks end with lines of codes. across: codes lie along n, not k.
bool has_pieces(const Operand& b, const OperandCodes& codes, const quant::FormatInfo& format,
                bool across, int64_t piece) {
  const ExpertQuant& of = codes.quant;
  const bool stream = format.storage == quant::Storage::kStream;
  const bool along_rows = across != codes.transposed;  // of the matrix, which are its outputs
  const quant::BlockSize along = along_rows && !stream ? of.scales.block_n : of.scales.block_k;
  const quant::BlockSize of_lines = along_rows ? of.scales.block_k : of.scales.block_n;
  const int64_t line = across ? b.k_stride : b.i_stride, copy = 128 / format.code_bits;
  const int64_t unit = std::max(copy, stream ? along.size() : 1);
  const bool whole = line % unit == 0 && of.expert_codes % unit == 0 &&
                     (b.pointers || b.group_stride * dtype_bytes(b.dtype) % 16 == 0);
  const bool one = along.is_all() ? !stream : along.size() % piece == 0;
  if (stream && (of.scales.block_n.is_all() || of.scales.block_n.size() != 1)) return false;
  // Nibbles along k: each line has scales of its own.
  if (!across && !stream && format.code_bits == 4 && (of_lines.is_all() || of_lines.size() != 1))
    return false;
  // Rows of the matrix, where they follow each other: from a multiple of 16 bytes on.
  if (along_rows && (of.rows.step != 1 || of.rows.first % unit)) return false;
  return whole && one && !of.group_index.present() && is_power(of.scales.block_k) &&
         is_power(of.scales.block_n) && is_power(of.scale_block);
}

}  // namespace

bool few_rows_takes(const PortableGemm& p, bool aligned) {
  if (!mma_takes(p, false, aligned) || !is_coded(p)) return false;
  const quant::FormatInfo& format = *quant::find_format(p.codes[0].quant.scheme);
  if (FewRowsFormats::index(format.scheme) < 0 || p.a.dtype != MOEC_BF16) return false;
  if (p.accumulate || p.column_scales.scale) return false;
  const bool across = is_across(p);
  const bool nibbles = format.code_bits == 4;
  const int64_t copy = 128 / format.code_bits;
  if (p.n < few_features(across, nibbles) || p.n * p.k >= kMostCodes) return false;
  if (across ? p.n % copy || p.k % 8 : p.k % copy) return false;
  if (p.groups.choice_rows > kMostRows * p.groups.count || 3 * p.groups.count > kMostTiles)
    return false;
  for (int i = 0; i < p.parts; ++i) {
    if ((across ? p.b[i].i_stride : p.b[i].k_stride) != 1) return false;
    if (!has_pieces(p.b[i], p.codes[i], format, across, few_piece(across, nibbles))) return false;
  }
  return true;
}

}  // namespace moec::cuda
