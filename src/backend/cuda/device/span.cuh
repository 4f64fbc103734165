// SPDX-License-Identifier: Apache-2.0
// A few neighbouring elements of a type known at run time, as fp32: four at once where everything
// lies so, else one. And the rows of groups that warps walk over.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backend/cuda/device/rows.h"
#include "backend/cuda/device/warp.cuh"
#include "core/dtype.h"

namespace moec::cuda {

template <int V>
struct Span {
  float v[V];
  __device__ float& operator[](int i) { return v[i]; }
  __device__ float operator[](int i) const { return v[i]; }
};

template <class T, int V>
struct alignas(V * sizeof(T)) Elements {
  T v[V];
};

__device__ __forceinline__ bf16 rounded(float value, bf16) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
}
__device__ __forceinline__ f16 rounded(float value, f16) {
  return {__half_as_ushort(__float2half_rn(value))};
}
__device__ __forceinline__ float rounded(float value, float) {
  return value;
}
__device__ __forceinline__ float widened(f16 value) {
  return __half2float(__ushort_as_half(value.bits));
}
template <class T>
__device__ __forceinline__ float widened(T value) {
  return to_float(value);
}

template <class T, int V>
__device__ __forceinline__ Span<V> load_elements(const Elements<T, V>& at) {
  const Elements<T, V> from = at;
  Span<V> span;
#pragma unroll
  for (int i = 0; i < V; ++i) span[i] = widened(from.v[i]);
  return span;
}
template <class T, int V>
__device__ __forceinline__ void store_elements(Elements<T, V>& at, const Span<V>& span) {
  Elements<T, V> to;
#pragma unroll
  for (int i = 0; i < V; ++i) to.v[i] = rounded(span[i], T());
  at = to;
}

// Elements [at, at + V); at is a multiple of V.
template <int V>
__device__ __forceinline__ Span<V> load_span(const void* base, moec_dtype dtype, int64_t at) {
  Span<V> span;
  with_real(dtype, [&]<class T>() {
    span = load_elements(static_cast<const Elements<T, V>*>(base)[at / V]);
  });
  return span;
}
template <int V>
__device__ __forceinline__ Span<V> load_span(const Array& from, int64_t at) {
  return load_span<V>(from.data, from.dtype, at);
}
template <int V>
__device__ __forceinline__ void store_span(void* base, moec_dtype dtype, int64_t at,
                                           const Span<V>& span) {
  with_real(dtype,
            [&]<class T>() { store_elements(static_cast<Elements<T, V>*>(base)[at / V], span); });
}
template <int V>
__device__ __forceinline__ void store_span(const Array& to, int64_t at, const Span<V>& span) {
  store_span<V>(to.data, to.dtype, at, span);
}
template <int V>
__device__ __forceinline__ void round_span(moec_dtype dtype, Span<V>& span) {
  with_real(dtype, [&]<class T>() {
#pragma unroll
    for (int i = 0; i < V; ++i) span[i] = widened(rounded(span[i], T()));
  });
}
template <int V>
__device__ __forceinline__ void add_scaled(Span<V>& sum, float weight, const Span<V>& part) {
#pragma unroll
  for (int i = 0; i < V; ++i) sum[i] += weight * part[i];
}

// Whether kernels may take four elements at once: all widths and addresses are multiples of four.
inline bool spans_fit(int64_t width) {
  return width % 4 == 0;
}
template <class... More>
bool spans_fit(int64_t width, const Array& array, const More&... more) {
  const uint64_t bytes = uint64_t(4 * dtype_bytes(array.dtype));
  return (!array.data || reinterpret_cast<uintptr_t>(array.data) % bytes == 0) &&
         spans_fit(width, more...);
}

// The group of a row, or -1 for padding.
__device__ inline int group_of(const RowGroups& groups, int64_t row) {
  if (!groups.offsets) return row < groups.max_rows ? 0 : -1;
  int low = 0, high = groups.count;  // offsets[low] <= row < offsets[high], or past the last
  if (row >= groups.offsets[high]) return -1;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (groups.offsets[middle] <= row ? low : high) = middle;
  }
  return row < groups.offsets[low] + groups.counts[low] ? low : -1;
}

__device__ inline int64_t global_warp() {
  return (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
}
__device__ inline int64_t global_warps() {
  return int64_t(gridDim.x) * blockDim.x / 32;
}

}  // namespace moec::cuda
