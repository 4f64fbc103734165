// SPDX-License-Identifier: Apache-2.0
// Codes of a byte.
#include "backend/cuda/sm80/mma_of_format.cuh"

template void moec::cuda::mma_rows_of<moec::quant::Int8>(const Op&, const PortableGemm&);
template void moec::cuda::mma_rows_of<moec::quant::Fp8>(const Op&, const PortableGemm&);
