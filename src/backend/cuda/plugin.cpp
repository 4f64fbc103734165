// SPDX-License-Identifier: Apache-2.0
// The plug-in's one exported function: what this library is, and which devices it sees.
#include <new>

#include "backend/cuda/cuda_backend.h"
#include "core/build_id.h"

namespace moec {
namespace {

int32_t device_count() {  // no driver, or one too old: no device, never an error
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

void device_info(int32_t device_id, moec_device_info* info) {
  cuda::fill_device_info(device_id, *info);
}

Backend* create(const BackendOptions& options, Error* error) {
  try {
    return new cuda::CudaBackend(options);
  } catch (const Error& failure) {
    *error = failure;
  } catch (const std::bad_alloc&) {
    *error = Error{MOEC_E_OUT_OF_MEMORY, 0, "no memory for a CUDA backend"};
  }
  return nullptr;
}

constexpr BackendEntry kEntry = {kBackendInterface, kBuildId, MOEC_CUDA,
                                 device_count,      create,   device_info};

}  // namespace
}  // namespace moec

extern "C" __attribute__((visibility("default"))) const moec::BackendEntry* moec_backend_entry() {
  return &moec::kEntry;
}
