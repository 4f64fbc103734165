// SPDX-License-Identifier: Apache-2.0
// Which products the tensor cores take, and those of plain operands and of fp32 that is rounded.
#include "backend/cuda/sm80/mma_of_format.cuh"

namespace moec::cuda {
namespace {

void plain_mma_product(const Op& op, const PortableGemm& p, bool weight_gradient) {
  using Along = std::true_type;
  using Across = std::false_type;
  static std::atomic<uint64_t> allowed[3];
  if (weight_gradient)
    launch<ShapeOf<void>>(op, p, true, portable_mma_kernel<void, false, Across, true>, allowed[0]);
  else if (p.b[0].k_stride == 1)
    launch<ShapeOf<void>>(op, p, false, portable_mma_kernel<void, true, Along, false>, allowed[1]);
  else
    launch<ShapeOf<void>>(op, p, false, portable_mma_kernel<void, true, Across, false>, allowed[2]);
}

bool fits(const Operand& operand, bool along_k) {
  return (along_k ? operand.k_stride : operand.i_stride) == 1 &&
         (along_k ? operand.i_stride : operand.k_stride) % 8 == 0;
}

// Whether eight neighbours of a chunk of codes lie together: in nibbles, rows that do not follow
// each other, or experts of a stream that begin elsewhere, do not.
bool has_chunks(const OperandCodes& codes, bool along_k) {
  bool chunks = false, nibbles = false;
  quant::Formats::with(codes.quant.scheme, [&]<class Format>() {
    chunks = kHasChunks<Format>;
    nibbles = kHasNibbles<Format>;
  });
  if (!chunks || !nibbles) return chunks;
  const bool along_n = along_k == codes.transposed;
  const quant::RowMap& rows = codes.quant.rows;
  return codes.quant.expert_codes % 8 == 0 && (!along_n || (rows.step == 1 && rows.first % 8 == 0));
}

}  // namespace

bool mma_takes(const PortableGemm& p, bool weight_gradient, bool aligned) {
  const moec_dtype dtype = p.a.dtype;
  if (!aligned || (dtype != MOEC_BF16 && dtype != MOEC_F16) || p.a_part % 8) return false;
  if (!fits(p.a, !weight_gradient)) return false;
  const bool along_k = !weight_gradient && p.b[0].k_stride == 1;
  const bool coded = is_coded(p), rounded = !coded && p.b[0].dtype != dtype;
  if ((coded || rounded) && (p.n % 8 || p.k % 8)) return false;
  for (int i = 0; i < p.parts; ++i) {
    if (dtype_of_b(p, i) != dtype || p.b[i].dtype != p.b[0].dtype || !fits(p.b[i], along_k))
      return false;
    if (coded && !has_chunks(p.codes[i], along_k)) return false;
  }
  return true;
}

void mma_product(const Op& op, const PortableGemm& p, bool weight_gradient) {
  if (!makes_b(p, weight_gradient))
    plain_mma_product(op, p, weight_gradient);
  else if (is_coded(p))
    mma_coded_product(op, p);
  else
    mma_rows_of<RoundedElements>(op, p);
}

}  // namespace moec::cuda
