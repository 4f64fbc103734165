// SPDX-License-Identifier: Apache-2.0
// Tensor maps for the bulk copy engine: bf16, f16 or f32 under the 128-byte swizzle, or bytes as
// they are, or under a swizzle of their own.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <moec/moec.h>

#include <cstdint>

namespace moec::cuda {

struct TensorMapShape {
  static constexpr int kMost = 5;
  const void* base;  // 16-byte aligned
  int rank = 3;
  int64_t extent[kMost] = {};      // innermost first; the innermost is contiguous
  int64_t stride[kMost - 1] = {};  // of dimensions 1, 2, .., elements; multiples of 16 bytes
  int box[kMost] = {1, 1, 1, 1, 1};
  bool swizzled = false;  // of bytes: a row of a box under the swizzle of its width, 32 or 64

  bool operator==(const TensorMapShape&) const = default;
};

// Whether the copy engine can describe this shape: alignment and stride rules.
bool tensor_map_fits(const TensorMapShape& shape, moec_dtype dtype);

// The same tensor with windows of `window` rows in the place of `dimension`, that of its rows, and
// behind it another one: the row at which a window ends. A copy of the last n rows of a window is
// one of n rows, wherever they lie: what its box has beyond them comes as zeros, and is not read.
// A part of a box must lie inside: for one that lies wholly outside the copy engine looks at the
// map's base, a window in front of the tensor, where there need be no memory (seen on an H200).
TensorMapShape in_windows(TensorMapShape shape, int dimension, int window, moec_dtype dtype);

// `count` maps of one tensor: map i has a box of box[2] * (i + 1) in dimension 2; at most
// kMaxTensorMaps. A map is a function of the arguments alone, so those made last are remembered:
// encoding takes about a microsecond, and a layer's step needs some hundred.
constexpr int kMaxTensorMaps = 9;
cudaError_t make_tensor_maps(CUtensorMap* maps, int count, moec_dtype dtype,
                             const TensorMapShape& shape);

}  // namespace moec::cuda
