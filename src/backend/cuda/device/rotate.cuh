// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace moec::cuda {

// Element 0 goes to the end: a loop that is not unrolled comes to all elements of registers.
template <class T, int N>
__device__ __forceinline__ void rotate(T (&values)[N]) {
  const T first = values[0];
#pragma unroll
  for (int i = 1; i < N; ++i) values[i - 1] = values[i];
  values[N - 1] = first;
}

}  // namespace moec::cuda
