// SPDX-License-Identifier: Apache-2.0
// Codes of e2m1 and of codebooks.
#include "backend/cuda/sm80/mma_of_format.cuh"

template void moec::cuda::mma_rows_of<moec::quant::Mxfp4>(const Op&, const PortableGemm&);
template void moec::cuda::mma_rows_of<moec::quant::Nvfp4>(const Op&, const PortableGemm&);
template void moec::cuda::mma_rows_of<moec::quant::Codebook4>(const Op&, const PortableGemm&);
