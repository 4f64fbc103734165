// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/tensor_map.h"

#include <algorithm>
#include <mutex>

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
};
Type type_of(moec_dtype dtype) {
  if (dtype == MOEC_F32) return {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4};
  return {dtype == MOEC_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
          2};
}

cudaError_t encode(CUtensorMap& map, moec_dtype dtype, const TensorMapShape& shape, int box2) {
  if (!encoder()) return cudaErrorNotSupported;
  const cuuint64_t extent[3] = {cuuint64_t(shape.extent[0]), cuuint64_t(shape.extent[1]),
                                cuuint64_t(shape.extent[2])};
  const Type type = type_of(dtype);
  const cuuint64_t stride[2] = {cuuint64_t(shape.stride[0] * type.bytes),
                                cuuint64_t(shape.stride[1] * type.bytes)};
  const cuuint32_t box[3] = {cuuint32_t(shape.box[0]), cuuint32_t(shape.box[1]), cuuint32_t(box2)};
  const cuuint32_t step[3] = {1, 1, 1};
  const CUresult result =
      encoder()(&map, type.type, 3, const_cast<void*>(shape.base), extent, stride, box, step,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
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
        const cudaError_t error = encode(slot.maps[i], dtype, shape, shape.box2 * (i + 1));
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
    for (const int64_t word :
         {int64_t(reinterpret_cast<uintptr_t>(s.base)), s.extent[0], s.extent[1], s.extent[2],
          s.stride[0], s.stride[1], int64_t(s.box[0]), int64_t(s.box[1]), int64_t(s.box2)}) {
      h = (h ^ uint64_t(word)) * 0x9e3779b97f4a7c15ull;
      h ^= h >> 32;
    }
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

bool tensor_map_fits(const TensorMapShape& shape, moec_dtype dtype) {
  bool fits = reinterpret_cast<uintptr_t>(shape.base) % 16 == 0;
  for (const int64_t stride : shape.stride) {
    fits = fits && stride * type_of(dtype).bytes % 16 == 0 && stride > 0 &&
           stride < (int64_t(1) << 39);
  }
  for (const int64_t extent : shape.extent) {
    fits = fits && extent > 0 && extent <= (int64_t(1) << 31);
  }
  return fits;
}

cudaError_t make_tensor_maps(CUtensorMap* maps, int count, moec_dtype dtype,
                             const TensorMapShape& shape) {
  return memo().find(maps, count, dtype, shape);
}

}  // namespace moec::cuda
