// SPDX-License-Identifier: Apache-2.0
// cuBLASLt, opened when first needed: a machine without it, or without a GPU, still loads the
// plug-in, and dense products run on our own kernel.
#pragma once

#include "backend/cuda/routing/dense.h"

namespace moec::cuda {

// Opens the library for the current device, so that no later call has to (a stream may be captured
// then).
void prepare_cublaslt();
// "cuBLASLt 130100 of <file>", or that it is not found, why, and what multiplies instead.
void describe_dense_products(char* text, size_t bytes);
// Whether it has a kernel for c [m,n] = the product: types, alignment, and the library itself.
bool cublaslt_fits(const Dense& dense, const Array& c, bool tf32);
// workspace: kCublasLtBytes.
void cublaslt_product(const Op& op, const Dense& dense, const Array& c, void* workspace);
inline constexpr uint64_t kCublasLtBytes = 4 << 20;

}  // namespace moec::cuda
