// SPDX-License-Identifier: Apache-2.0
// What one call of the backend works with: its stream, the device, and scratch of the context.
#pragma once

#include <cuda_runtime_api.h>

#include "backend/args.h"
#include "backend/cuda/device/deferred.h"
#include "backend/host_services.h"

namespace moec::cuda {

struct Op {
  const HostServices& host;
  int multiprocessors;
  bool clusters;     // the device has thread block clusters
  bool tf32;         // products of f32 may be rounded to TF32
  WrongData* wrong;  // where kernels report wrong data
  cudaStream_t stream;

  void count(uint64_t kernels, uint64_t flops = 0) const {
    if (host.count_launch) host.count_launch(host.self, kernels, flops);
  }
};

// Scratch of one call, given back in stream order on scope exit. 64-byte aligned.
class Scratch {
 public:
  Scratch(const Op& op, uint64_t bytes)
      : op_(op), data_(bytes ? op.host.acquire(op.host.self, bytes, op.stream) : nullptr) {}
  ~Scratch() {
    if (data_) op_.host.release(op_.host.self, data_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  const Op& op_;
  void* data_;
};

}  // namespace moec::cuda
