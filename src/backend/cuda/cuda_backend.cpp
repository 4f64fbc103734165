// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/cuda_backend.h"

#include <atomic>
#include <cstdio>

#include "backend/cuda/device/check.h"
#include "backend/cuda/device/pointer_table.h"
#include "backend/cuda/plan/plan.h"
#include "backend/cuda/ranks/rank_steps.h"
#include "backend/cuda/routing/cublaslt.h"
#include "backend/cuda/routing/gate.h"
#include "backend/cuda/routing/loss.h"
#include "backend/cuda/routing/route.h"
#include "backend/cuda/rows/permute.h"
#include "backend/cuda/sm80/weight_values.h"
#include "backend/cuda/weights/factors.h"
#include "backend/cuda/weights/quantise.h"

namespace moec::cuda {
namespace {

cudaStream_t as_stream(moec_stream stream) {
  return static_cast<cudaStream_t>(stream);
}

}  // namespace

void fill_device_info(int32_t device_id, moec_device_info& info) {
  cudaDeviceProp device;
  if (cudaGetDeviceProperties(&device, device_id) != cudaSuccess) return;
  info.device_type = MOEC_CUDA;
  info.device_id = device_id;
  info.compute_major = device.major;
  info.compute_minor = device.minor;
  info.multiprocessors = device.multiProcessorCount;
  info.numa_node = -1;
  info.total_bytes = info.free_bytes = device.totalGlobalMem;
  std::snprintf(info.name, sizeof info.name, "%.127s", device.name);
  std::snprintf(info.backend, sizeof info.backend, "cuda");
  std::snprintf(info.arch, sizeof info.arch, "sm_%d%d", device.major, device.minor);
}

CudaBackend::CudaBackend(const BackendOptions& options)
    : device_(options.device_id), tf32_(options.math == MOEC_MATH_TF32) {
  int major = 0, minor = 0;
  const DeviceScope scope(device_);
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_),
        "compute capability");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device_),
        "compute capability");
  check(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device_),
        "multiprocessor count");
  check(cudaDeviceGetAttribute(&pageable_, cudaDevAttrPageableMemoryAccess, device_),
        "pageable memory access");
  MOEC_REQUIRE(major >= 8, MOEC_E_UNSUPPORTED,
               "cuda:%d has compute capability %d.%d; the CUDA backend needs 8.0 or later", device_,
               major, minor);
  own_paths_ = make_paths(*this, major, minor);
  for (const auto& path : own_paths_) paths_.push_back(path.get());
  clusters_ = major >= 9;
  deferred_ = std::make_unique<Deferred>();
}

void CudaBackend::device_info(moec_device_info& info) const {
  fill_device_info(device_, info);
  const DeviceScope scope(device_);
  size_t free_bytes = 0, total_bytes = 0;
  if (cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess) info.free_bytes = free_bytes;
}

// ---- memory and time
void* CudaBackend::allocate(uint64_t bytes, Place place, moec_stream) const {  // for any stream
  const DeviceScope scope(device_);
  const RelaxedCapture relaxed;
  void* pointer = nullptr;
  if (place == Place::kShared)
    check(cudaHostAlloc(&pointer, bytes, cudaHostAllocPortable | cudaHostAllocMapped),
          "cudaHostAlloc");
  else
    check(cudaMalloc(&pointer, bytes), "cudaMalloc");
  return pointer;
}
void CudaBackend::release(void* pointer, moec_stream) const {
  // The stream of the last use may be gone by now, and work on it still under way: cudaFree waits
  // for all of it, and leaves streams that are captured alone (cudaDeviceSynchronize ends them).
  const RelaxedCapture relaxed;
  int before = device_;
  cudaGetDevice(&before);
  cudaSetDevice(device_);
  cudaPointerAttributes memory;
  const bool shared = cudaPointerGetAttributes(&memory, pointer) == cudaSuccess &&
                      memory.type == cudaMemoryTypeHost;
  shared ? cudaFreeHost(pointer) : cudaFree(pointer);
  cudaSetDevice(before);
}
void CudaBackend::copy(void* to, const void* from, uint64_t bytes, moec_stream stream) const {
  const DeviceScope scope(device_);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, as_stream(stream)), "cudaMemcpyAsync");
}
void CudaBackend::store(void* to, const void* from, uint64_t bytes, moec_stream stream) const {
  const DeviceScope scope(device_);
  store_words(op(stream), to, from, bytes);
}
void CudaBackend::zero(void* to, uint64_t bytes, moec_stream stream) const {
  const DeviceScope scope(device_);
  check(cudaMemsetAsync(to, 0, bytes, as_stream(stream)), "cudaMemsetAsync");
}
void CudaBackend::synchronize(moec_stream stream) const {
  const DeviceScope scope(device_);
  check(cudaStreamSynchronize(as_stream(stream)), "cudaStreamSynchronize");
  deferred_->raise();
}
moec_status CudaBackend::poll() const {
  const DeviceScope scope(device_);
  size_t free_bytes = 0, total_bytes = 0;  // any call tells of a lost device; this one never waits
  return cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess ? deferred_->poll() : MOEC_E_CUDA;
}
bool CudaBackend::reaches(const void* pointer) const {
  const DeviceScope scope(device_);
  cudaPointerAttributes memory;
  check(cudaPointerGetAttributes(&memory, pointer), "cudaPointerGetAttributes");
  return memory.type == cudaMemoryTypeUnregistered ? pageable_ : memory.devicePointer != nullptr;
}
bool CudaBackend::capturing(moec_stream stream) const {
  const DeviceScope scope(device_);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(as_stream(stream), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}
uint64_t CudaBackend::stream_id(moec_stream stream) const {
  if (stream == cudaStreamPerThread) {
    static std::atomic<uint64_t> threads{0};
    thread_local const uint64_t id = ~threads.fetch_add(1);  // the driver's ids count up
    return id;
  }
  if (capturing(stream)) return 0;
  const DeviceScope scope(device_);
  unsigned long long id = 0;
  check(cudaStreamGetId(as_stream(stream), &id), "cudaStreamGetId");
  return id;
}

// ---- operations
namespace {

struct Run {
  const Op& op;
  void operator()(const GateArgs& args) const { gate_forward(op, args); }
  void operator()(const GateGradArgs& args) const { gate_backward(op, args); }
  void operator()(const RouteArgs& args) const { route_forward(op, args); }
  void operator()(const RouteGradArgs& args) const { route_backward(op, args); }
  void operator()(const BiasUpdateArgs& args) const { bias_update(op, args); }
  void operator()(const LossArgs& args) const {
    args.backward ? loss_backward(op, args) : loss_forward(op, args);
  }
  void operator()(const PlanArgs& args) const { build_plan(op, *args.source, *args.plan); }
  void operator()(const MapArgs& args) const { export_map(op, *args.plan, args.field, args.to); }
  void operator()(const PermuteArgs& args) const { permute(op, args); }
  void operator()(const UnpermuteArgs& args) const { unpermute(op, args); }
  void operator()(const PermuteGradArgs& args) const { permute_backward(op, args); }
  void operator()(const UnpermuteGradArgs& args) const { unpermute_backward(op, args); }
  void operator()(const ValuesArgs& args) const { weight_values(op, args); }
  void operator()(const MergeArgs& args) const { merge_factors(op, args); }
  void operator()(const QuantiseArgs& args) const { quantise(op, args); }
};

}  // namespace

void CudaBackend::run(const Operation& operation, moec_stream stream) const {
  const Call call(*this, stream);
  operation.visit(Run{call.op});
}
void CudaBackend::prepare_router(const moec_router_desc&) const {
  const DeviceScope scope(device_);
  prepare_cublaslt();
}
moec_size CudaBackend::router_scratch(const moec_router_desc& desc, int64_t hidden) const {
  const moec_size gate = gate_scratch(desc, hidden), route = route_scratch(desc);
  return {gate.base + route.base, gate.per_token + route.per_token};
}
moec_size CudaBackend::plan_scratch(const moec_plan_desc& desc) const {
  return cuda::plan_scratch(desc);
}
void CudaBackend::between_ranks(const RankStep& step, moec_stream stream) const {
  const Call call(*this, stream);
  cuda::between_ranks(call.op, step);
}

}  // namespace moec::cuda
