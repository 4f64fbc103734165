// SPDX-License-Identifier: Apache-2.0
// CUDA results to Error, with the words of what was tried.
#pragma once

#include <cuda_runtime_api.h>

#include "core/error.h"

namespace moec::cuda {

inline void check(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // the message carries it; the next call starts clean
  fail_native(result == cudaErrorMemoryAllocation ? MOEC_E_OUT_OF_MEMORY : MOEC_E_CUDA, int(result),
              "%s: %s", what, cudaGetErrorString(result));
}

// Makes a device current for one call and puts the caller's back.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    if (cudaGetDevice(&before_) == cudaSuccess && before_ == device) before_ = -1;
    check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceScope() {
    if (before_ >= 0) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = -1;
};

// While one lives, calls of this thread that allocate or free do not end another thread's capture.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace moec::cuda
