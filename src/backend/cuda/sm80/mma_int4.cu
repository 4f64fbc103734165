// SPDX-License-Identifier: Apache-2.0
// Codes of integers of 4 bits.
#include "backend/cuda/sm80/mma_of_format.cuh"

template void moec::cuda::mma_rows_of<moec::quant::Int4>(const Op&, const PortableGemm&);
template void moec::cuda::mma_rows_of<moec::quant::Awq>(const Op&, const PortableGemm&);
