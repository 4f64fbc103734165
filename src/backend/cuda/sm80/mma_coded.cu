// SPDX-License-Identifier: Apache-2.0
// Products of coded matrices on the tensor cores: their kernels are compiled in a file of each kind
// of codes.
#include "backend/cuda/device/codes.cuh"
#include "backend/cuda/sm80/mma_formats.h"

namespace moec::cuda {

void mma_coded_product(const Op& op, const PortableGemm& p) {
  quant::Formats::with(p.codes[0].quant.scheme, [&]<class Format>() {
    if constexpr (kHasChunks<Format>) mma_rows_of<Format>(op, p);
  });
}

}  // namespace moec::cuda
