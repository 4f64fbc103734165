// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/sm90/tensor_map.h"

#include <algorithm>
#include <mutex>

#include "core/dtype.h"

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

struct Type {
  CUtensorMapDataType type;
  int64_t bytes;
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
};
Type type_of(moec_dtype dtype) {
  if (dtype == MOEC_F32) return {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4};
  if (dtype_bytes(dtype) == 1)
    return {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, CU_TENSOR_MAP_SWIZZLE_NONE};
  return {dtype == MOEC_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
          2};
}

CUtensorMapSwizzle swizzle_of(const Type& type, const TensorMapShape& shape) {
  if (!shape.swizzled) return type.swizzle;
  return shape.box[0] == 32 ? CU_TENSOR_MAP_SWIZZLE_32B : CU_TENSOR_MAP_SWIZZLE_64B;
}

cudaError_t encode(CUtensorMap& map, moec_dtype dtype, const TensorMapShape& shape, int times) {
  if (!encoder()) return cudaErrorNotSupported;
  const Type type = type_of(dtype);
  cuuint64_t extent[TensorMapShape::kMost], stride[TensorMapShape::kMost - 1];
  cuuint32_t box[TensorMapShape::kMost], step[TensorMapShape::kMost];
  for (int i = 0; i < shape.rank; ++i) {
    extent[i] = cuuint64_t(shape.extent[i]);
    if (i > 0) stride[i - 1] = cuuint64_t(shape.stride[i - 1] * type.bytes);
    box[i] = cuuint32_t(shape.box[i] * (i == 2 ? times : 1));
    step[i] = 1;
  }
  const CUresult result =
      encoder()(&map, type.type, cuuint32_t(shape.rank), const_cast<void*>(shape.base), extent,
                stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(type, shape),
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// The maps made last, by a hash of what they were made from. A slot that is taken is overwritten.
class Memo {
 public:
  cudaError_t find(CUtensorMap* maps, int count, moec_dtype dtype, const TensorMapShape& shape) {
    const std::lock_guard lock(mutex_);
    Slot& slot = slots_[hash(dtype, shape) % kSlots];
    if (slot.count < count || slot.dtype != dtype || !(slot.shape == shape)) {
      slot.count = 0;  // half-made slots are empty
      for (int i = 0; i < count; ++i) {
        const cudaError_t error = encode(slot.maps[i], dtype, shape, i + 1);
        if (error != cudaSuccess) return error;
      }
      slot.dtype = dtype;
      slot.shape = shape;
      slot.count = count;
    }
    std::copy_n(slot.maps, count, maps);
    return cudaSuccess;
  }

 private:
  static constexpr int kSlots = 256;
  struct Slot {
    int count = 0;
    moec_dtype dtype = {};
    TensorMapShape shape = {};
    CUtensorMap maps[kMaxTensorMaps];
  };

  static uint64_t hash(moec_dtype dtype, const TensorMapShape& s) {
    uint64_t h = uint64_t(dtype);
    const auto mix = [&](int64_t word) {
      h = (h ^ uint64_t(word)) * 0x9e3779b97f4a7c15ull;
      h ^= h >> 32;
    };
    mix(int64_t(reinterpret_cast<uintptr_t>(s.base)));
    for (const int64_t extent : s.extent) mix(extent);
    for (const int64_t stride : s.stride) mix(stride);
    for (const int box : s.box) mix(box);
    mix(s.swizzled);
    return h;
  }

  std::mutex mutex_;
  Slot slots_[kSlots];
};

Memo& memo() {
  static Memo* const memo = new Memo;  // lives as long as the process: launches may outlive main
  return *memo;
}

}  // namespace

// The first window ends at row 0: it lies in front of the tensor, and no copy asks for any of it.
TensorMapShape in_windows(TensorMapShape shape, int dimension, int window, moec_dtype dtype) {
  for (int i = shape.rank++; i > dimension; --i) {
    shape.extent[i] = shape.extent[i - 1];
    shape.stride[i - 1] = shape.stride[i - 2];
    shape.box[i] = shape.box[i - 1];
  }
  const int64_t row_bytes = shape.stride[dimension] * type_of(dtype).bytes;
  shape.base = static_cast<const char*>(shape.base) - window * row_bytes;
  shape.extent[dimension] = window;
  ++shape.extent[dimension + 1];
  shape.box[dimension + 1] = 1;
  return shape;
}

bool tensor_map_fits(const TensorMapShape& shape, moec_dtype dtype) {
  bool fits = reinterpret_cast<uintptr_t>(shape.base) % 16 == 0;
  for (int i = 0; i < shape.rank; ++i) {
    fits = fits && shape.extent[i] > 0 && shape.extent[i] <= (int64_t(1) << 31);
  }
  for (int i = 0; i + 1 < shape.rank; ++i) {
    const int64_t stride = shape.stride[i];
    fits = fits && stride * type_of(dtype).bytes % 16 == 0 && stride > 0 &&
           stride < (int64_t(1) << 39);
  }
  return fits;
}

cudaError_t make_tensor_maps(CUtensorMap* maps, int count, moec_dtype dtype,
                             const TensorMapShape& shape) {
  return memo().find(maps, count, dtype, shape);
}

}  // namespace moec::cuda
