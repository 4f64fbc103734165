// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/tensor_map.h"

namespace moec::cuda {
namespace {

// From the driver at run time, so that nothing links libcuda.
decltype(&cuTensorMapEncodeTiled) encoder() {
  static const auto function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found = {};
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                         &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess) {
      entry = nullptr;
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  return function;
}

}  // namespace

bool tensor_map_fits(const TensorMapShape& shape) {
  bool fits = reinterpret_cast<uintptr_t>(shape.base) % 16 == 0;
  for (const int64_t stride : shape.stride) {
    fits = fits && stride % 8 == 0 && stride > 0 && stride < (int64_t(1) << 39);
  }
  for (const int64_t extent : shape.extent) {
    fits = fits && extent > 0 && extent <= (int64_t(1) << 31);
  }
  return fits;
}

cudaError_t make_tensor_map(CUtensorMap& map, moec_dtype dtype, const TensorMapShape& shape) {
  if (!encoder()) return cudaErrorNotSupported;
  const cuuint64_t extent[3] = {cuuint64_t(shape.extent[0]), cuuint64_t(shape.extent[1]),
                                cuuint64_t(shape.extent[2])};
  const cuuint64_t stride[2] = {cuuint64_t(shape.stride[0]) * 2, cuuint64_t(shape.stride[1]) * 2};
  const cuuint32_t box[3] = {cuuint32_t(shape.box[0]), cuuint32_t(shape.box[1]),
                             cuuint32_t(shape.box2)};
  const cuuint32_t step[3] = {1, 1, 1};
  const CUresult result = encoder()(
      &map, dtype == MOEC_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      3, const_cast<void*>(shape.base), extent, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace moec::cuda
