// SPDX-License-Identifier: Apache-2.0
// Row products of matrices of one format, by mma_kernel.cuh.
#pragma once

#include "backend/cuda/sm80/row_product_params.h"

namespace moec::cuda {

template <class Format>
void mma_rows_of(const Op& op, const PortableGemm& gemm);

}  // namespace moec::cuda
