// SPDX-License-Identifier: Apache-2.0
// Functions of the CUDA driver, found at run time, so that nothing links libcuda.
#pragma once

#include <cuda.h>

#include "gpu/device_memory.h"

namespace moec::test {

template <typename Function>
Function* driver(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = {};
  CHECK_CUDA(cudaGetDriverEntryPointByVersion(name, &entry, 12030, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess)
    throw std::runtime_error(std::string("the driver has no ") + name);
  return reinterpret_cast<Function*>(entry);
}
#define MOEC_DRIVER(function) ::moec::test::driver<decltype(function)>(#function)

}  // namespace moec::test
