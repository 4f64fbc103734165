// SPDX-License-Identifier: Apache-2.0
// Launch a kernel so that its prologue may overlap the end of the kernel before it.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace moec::cuda {

// Let `kernel` use more than 48 KiB of shared memory, once a device.
template <typename Kernel>
cudaError_t allow_shared_memory(Kernel* kernel, int bytes, std::atomic<uint64_t>& done) {
  int device = 0;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  if (device < 64 && (done.load(std::memory_order_relaxed) >> device & 1)) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess && device < 64) done.fetch_or(uint64_t(1) << device);
  return error;
}

// CTAs of a persistent kernel of pairs: one a multiprocessor, without an odd last one.
inline int ctas_in_pairs(int multiprocessors) {
  return multiprocessors < 2 ? 2 : multiprocessors / 2 * 2;
}

template <typename... Params, typename... Args>
cudaError_t launch_cluster(void (*kernel)(Params...), dim3 grid, int cluster, int threads,
                           int shared_bytes, cudaStream_t stream, Args&&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {unsigned(cluster), 1, 1};
  config.attrs = attributes;
  config.numAttrs = cluster > 0 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Args&&>(args)...);
}

template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, int threads, int shared_bytes,
                   cudaStream_t stream, Args&&... args) {
  return launch_cluster(kernel, grid, 0, threads, shared_bytes, stream,
                        static_cast<Args&&>(args)...);
}

}  // namespace moec::cuda
