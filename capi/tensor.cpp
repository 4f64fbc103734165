// SPDX-License-Identifier: Apache-2.0
// Tensors as plain data.
#include <algorithm>

#include "boundary.h"
#include "core/dtype.h"
#include "layer/check.h"

using namespace moec;
using namespace moec::capi;

namespace {

struct DlTensor {  // DLPack's DLTensor, versions 0.x and 1.x
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // null = compact
  uint64_t byte_offset;
};
static_assert(sizeof(DlTensor) == 48);

void check_ndim(int32_t ndim) {
  check_range("ndim", ndim, 0, MOEC_MAX_DIMS);
}

}  // namespace

moec_status moec_tensor_make(moec_tensor* out, void* data, moec_dtype dtype, int32_t device_type,
                             int32_t device_id, int32_t ndim, const int64_t* shape) {
  return guard(__func__, [&] {
    moec_tensor& result = required(out, "out", 1);
    check_ndim(ndim);
    moec_tensor tensor = {};
    tensor.data = data;
    tensor.device_type = device_type;
    tensor.device_id = device_id;
    tensor.dtype = dtype;
    tensor.ndim = ndim;
    for (int32_t i = 0; i < ndim; ++i) tensor.shape[i] = (&required(shape, "shape", 7))[i];
    check_tensor("tensor", tensor);
    if (tensor_numel(tensor) > 0)  // an empty tensor's other extents may be anything
      for (int64_t i = ndim - 1, step = 1; i >= 0; step *= tensor.shape[i--])
        tensor.strides[i] = step;
    result = tensor;
  });
}

moec_status moec_tensor_from_dlpack(const void* dl_tensor, moec_tensor* out) {
  return guard(__func__, [&] {
    const auto& from = *static_cast<const DlTensor*>(
        &required(static_cast<const DlTensor*>(dl_tensor), "dl_tensor", 1));
    moec_tensor& result = required(out, "out", 2);
    check_ndim(from.ndim);
    if (from.ndim) required(from.shape, "dl_tensor.shape", 1);
    moec_tensor tensor = {};
    tensor.data = from.data;
    tensor.byte_offset = from.byte_offset;
    tensor.device_type = from.device_type;
    tensor.device_id = from.device_id;
    tensor.dtype = uint32_t(from.code) | uint32_t(from.bits) << 8 | uint32_t(from.lanes) << 16;
    tensor.ndim = from.ndim;
    for (int32_t i = 0; i < from.ndim; ++i) {
      tensor.shape[i] = from.shape[i];
      tensor.strides[i] = from.strides ? from.strides[i] : 0;
    }
    // DLPack's zeros are strides, moec_tensor's say "compact".
    const int64_t numel = tensor_numel(tensor);
    const bool broadcast = from.strides && numel > 1 &&
                           std::all_of(from.strides, from.strides + from.ndim,
                                       [](int64_t stride) { return stride == 0; });
    MOEC_REQUIRE(!broadcast, MOEC_E_LAYOUT,
                 "dl_tensor has stride 0 in each dimension, one element for all %lld; expected "
                 "compact row-major",
                 static_cast<long long>(numel));
    result = tensor;
  });
}

int64_t moec_tensor_numel(const moec_tensor* tensor) {
  return tensor ? tensor_numel(*tensor) : -1;
}

int64_t moec_tensor_bytes(const moec_tensor* tensor) {
  int64_t bytes = -1;
  const int64_t numel = moec_tensor_numel(tensor);
  if (numel < 0 || !known_name(tensor->dtype) ||
      __builtin_mul_overflow(numel, dtype_bytes(tensor->dtype), &bytes))
    return -1;
  return bytes;
}

moec_status moec_tensor_check(const moec_tensor* tensor) {
  return guard(__func__, [&] { check_tensor("tensor", required(tensor, "tensor", 1)); });
}
