// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm80/few_rows.h"

namespace moec::cuda {
namespace {

constexpr int64_t kMostRows = 16;                 // an expert, on average
constexpr int64_t kMostTiles = 65535;             // of a grid along y
constexpr int64_t kMostCodes = int64_t(1) << 31;  // of a matrix: their numbers have 32 bits

bool is_power(const quant::BlockSize& size) {
  return size.is_power() && (size.is_all() || size.size() < kMostCodes);
}

// Whether pieces lie at 16 bytes, and each has one scale, which shifts find; in streams, whether
// blocks end with rows.
bool has_pieces(const Operand& b, const OperandCodes& codes, const quant::FormatInfo& format) {
  const ExpertQuant& of = codes.quant;
  const quant::BlockSize along_k = of.scales.block_k;
  const bool stream = format.storage == quant::Storage::kStream;
  const int64_t piece = 128 / format.code_bits, rows = stream ? along_k.size() : piece;
  const bool whole = b.i_stride % rows == 0 && of.expert_codes % rows == 0 &&
                     (b.pointers || b.group_stride * dtype_bytes(b.dtype) % 16 == 0);
  const bool one = along_k.is_all() ? !stream : along_k.size() % piece == 0;
  if (stream && (of.scales.block_n.is_all() || of.scales.block_n.size() != 1)) return false;
  return whole && one && !codes.transposed && !of.group_index.present() && is_power(along_k) &&
         is_power(of.scales.block_n) && is_power(of.scale_block);
}

}  // namespace

bool few_rows_takes(const PortableGemm& p, bool aligned) {
  if (!mma_takes(p, false, aligned) || !is_coded(p)) return false;
  const quant::FormatInfo& format = *quant::find_format(p.codes[0].quant.scheme);
  if (FewRowsFormats::index(format.scheme) < 0 || p.k % (128 / format.code_bits)) return false;
  if (p.a.dtype != MOEC_BF16) return false;
  if (p.sum || p.accumulate || p.column_scales.scale || p.b[0].k_stride != 1) return false;
  if (p.n < kFewFeatures || p.n * p.k >= kMostCodes) return false;
  if (p.groups.max_rows > kMostRows * p.groups.count || 2 * p.groups.count > kMostTiles)
    return false;
  for (int i = 0; i < p.parts; ++i)
    if (!has_pieces(p.b[i], p.codes[i], format)) return false;
  return true;
}

}  // namespace moec::cuda
