// SPDX-License-Identifier: Apache-2.0
// Products of coded matrices on the tensor cores.
#include "backend/cuda/device/codes.cuh"
#include "backend/cuda/sm80/mma_of_format.cuh"

namespace moec::cuda {
namespace {

// Those whose codes come in chunks.
using ChunkFormats = quant::FormatList<quant::Int8, quant::Fp8, quant::Mxfp4, quant::Nvfp4,
                                       quant::Codebook4, quant::Int4>;
constexpr bool are_all(bool all = true) {
  quant::Formats::for_each([&]<class Format>() {
    all = all && kHasChunks<Format> == (ChunkFormats::index(Format::kInfo.scheme) >= 0);
  });
  return all;
}
static_assert(are_all());

}  // namespace

void mma_coded_product(const Op& op, const PortableGemm& p) {
  ChunkFormats::with(p.codes[0].quant.scheme, [&]<class Format>() { mma_rows_of<Format>(op, p); });
}

}  // namespace moec::cuda
