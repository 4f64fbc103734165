// SPDX-License-Identifier: Apache-2.0
// Row products of coded matrices whose experts have few rows (few_rows.cu).
#pragma once

#include "backend/cuda/sm80/row_product_params.h"
#include "quant/format.h"

namespace moec::cuda {

// A tile of a CTA: rows, and features of the matrix.
constexpr int kFewRows = 16, kFewFeatures = 32;

// Formats that the kernel has.
using FewRowsFormats =
    quant::FormatList<quant::Int8, quant::Fp8, quant::Codebook4, quant::Mxfp4, quant::Int4>;

// A function of the problem alone. aligned: as mma_takes has it.
bool few_rows_takes(const PortableGemm& gemm, bool aligned);
void few_rows_product(const Op& op, const PortableGemm& gemm);

}  // namespace moec::cuda
