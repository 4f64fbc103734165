// SPDX-License-Identifier: Apache-2.0
// The plug-in's one exported function: what this library is, and which devices it sees.
#include <cuda_runtime_api.h>

#include <cstdio>

#include "backend/backend.h"
#include "core/build_id.h"

namespace moec {
namespace {

int32_t device_count() {  // no driver, or one too old: no device, never an error
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

void device_info(int32_t device_id, moec_device_info* info) {
  cudaDeviceProp device;
  if (cudaGetDeviceProperties(&device, device_id) != cudaSuccess) return;
  info->compute_major = device.major;
  info->compute_minor = device.minor;
  info->multiprocessors = device.multiProcessorCount;
  info->numa_node = -1;
  info->total_bytes = info->free_bytes = device.totalGlobalMem;
  std::snprintf(info->name, sizeof info->name, "%.127s", device.name);
  std::snprintf(info->backend, sizeof info->backend, "cuda");
  std::snprintf(info->arch, sizeof info->arch, "sm_%d%d", device.major, device.minor);
}

Backend* create(const BackendOptions&, Error* error) {
  *error = Error{MOEC_E_UNSUPPORTED, 0,
                 "the CUDA backend of this build computes no layer; use device_type MOEC_CPU (1)"};
  return nullptr;
}

constexpr BackendEntry kEntry = {kBackendInterface, kBuildId, MOEC_CUDA,
                                 device_count,      create,   device_info};

}  // namespace
}  // namespace moec

extern "C" __attribute__((visibility("default"))) const moec::BackendEntry* moec_backend_entry() {
  return &moec::kEntry;
}
