// SPDX-License-Identifier: Apache-2.0
// What the files of mma_formats.h instantiate.
#pragma once

#include "backend/cuda/sm80/mma_formats.h"
#include "backend/cuda/sm80/mma_kernel.cuh"

namespace moec::cuda {

template <class Format>
void mma_rows_of(const Op& op, const PortableGemm& p) {
  if (p.a.dtype == MOEC_BF16)
    launch_rows<__nv_bfloat16, Format>(op, p);
  else
    launch_rows<__half, Format>(op, p);
}

}  // namespace moec::cuda
