// SPDX-License-Identifier: Apache-2.0
// Row products of matrices of one format.
#pragma once

#include "backend/cuda/sm80/mma_kernel.cuh"

namespace moec::cuda {

template <class Format>
void mma_rows_of(const Op& op, const PortableGemm& p) {
  static std::atomic<uint64_t> allowed;
  launch<ShapeOf<Format>>(op, p, false, portable_mma_kernel<Format, true, bool, false>, allowed);
}

}  // namespace moec::cuda
