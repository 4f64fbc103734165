// SPDX-License-Identifier: Apache-2.0
// Tensor maps for the bulk copy engine: three dimensions of 16-bit elements, 128-byte swizzle.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <moec/moec.h>

#include <cstdint>

namespace moec::cuda {

struct TensorMapShape {
  const void* base;   // 16-byte aligned
  int64_t extent[3];  // innermost first; the innermost is contiguous
  int64_t stride[2];  // of dimensions 1 and 2, elements; multiples of 8
  int box[2];         // of dimensions 0 and 1; dimension 2 has box 1 unless box2 says more
  int box2 = 1;
};

// Whether the copy engine can describe this shape: alignment and stride rules.
bool tensor_map_fits(const TensorMapShape& shape);
cudaError_t make_tensor_map(CUtensorMap& map, moec_dtype dtype, const TensorMapShape& shape);

}  // namespace moec::cuda
