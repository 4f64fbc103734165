// SPDX-License-Identifier: Apache-2.0
#include <cstdint>

#include "occupy.h"

namespace moec::test {
namespace {

__global__ void spin(const volatile int* stop, uint64_t nanoseconds) {
  const auto now = [] {
    uint64_t time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
  };
  const uint64_t begin = now();
  while (*stop == 0 && now() - begin < nanoseconds) {
  }
}

}  // namespace

cudaError_t occupy(int blocks, const int* stop, int milliseconds, cudaStream_t stream) {
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaFuncSetAttribute(spin, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  spin<<<blocks, 1024, bytes, stream>>>(stop, uint64_t(milliseconds) * 1000000u);
  return cudaGetLastError();
}

}  // namespace moec::test
