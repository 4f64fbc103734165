// SPDX-License-Identifier: Apache-2.0
// The plug-in's one exported function: what this library is, and which devices it sees.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <new>
#include <string>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/routing/cublaslt.h"
#include "core/build_id.h"

namespace moec {
namespace {

constexpr int kOldestDriver = 580;
static_assert(CUDART_VERSION / 1000 == 13, "the oldest driver of this CUDA is another");

int32_t device_count() {  // no driver, or one too old: no device, never an error
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

// The release that the kernel module calls itself, such as 570.86.15; empty where there is none.
std::string driver_release() {
  std::string release;
  std::ifstream("/sys/module/nvidia/version") >> release;
  return release;
}

DeviceSearch search() {
  DeviceSearch found = {"ready", 0, 0, CUDART_VERSION, {}};
  const auto missing = [&found](const char* state, const char* format, auto... values) {
    std::snprintf(found.state, sizeof found.state, "%s", state);
    std::snprintf(found.text, sizeof found.text, format, values...);
    return found;
  };
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  cudaGetLastError();  // it is told here; the next call starts clean
  cudaDriverGetVersion(&found.driver_version);
  found.native_code = int32_t(result);
  const int own = found.needs_version / 1000, version = found.driver_version;
  if (result == cudaSuccess && count > 0) return found;
  if (version == 0)
    return missing("no_driver",
                   "libcuda.so.1 is not found: no NVIDIA driver is installed; CUDA %d needs driver "
                   "%d or newer",
                   own, kOldestDriver);
  if (version < 1000 * own) {
    const std::string release = driver_release();
    return missing("old_driver",
                   "the NVIDIA driver %s%sserves CUDA up to %d.%d; this plug-in is built for CUDA "
                   "%d.%d, which needs driver %d or newer",
                   release.c_str(), release.empty() ? "" : " ", version / 1000, version % 1000 / 10,
                   own, found.needs_version % 1000 / 10, kOldestDriver);
  }
  if (result == cudaSuccess || result == cudaErrorNoDevice) {
    const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
    return missing("no_device", "the NVIDIA driver shows no GPU%s%.60s",
                   visible ? "; CUDA_VISIBLE_DEVICES is " : "",
                   visible ? *visible ? visible : "empty" : "");
  }
  return missing("failed", "the NVIDIA driver fails: %s (%s)", cudaGetErrorString(result),
                 cudaGetErrorName(result));
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

constexpr BackendEntry kEntry = {kBackendInterface,
                                 kBuildId,
                                 MOEC_CUDA,
                                 device_count,
                                 create,
                                 device_info,
                                 search,
                                 cuda::describe_dense_products};

}  // namespace
}  // namespace moec

extern "C" __attribute__((visibility("default"))) const moec::BackendEntry* moec_backend_entry() {
  return &moec::kEntry;
}
