// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/cuda_backend.h"

#include <cstdio>

#include "backend/cuda/check.h"
#include "backend/cuda/combine.h"
#include "backend/cuda/gate.h"
#include "backend/cuda/plan.h"
#include "backend/cuda/route.h"

namespace moec::cuda {
namespace {

cudaStream_t as_stream(moec_stream stream) {
  return static_cast<cudaStream_t>(stream);
}

[[noreturn]] void refuse(const char* what, const char* instead) {
  MOEC_FAIL(MOEC_E_UNSUPPORTED, "the CUDA backend has no kernel for %s; %s", what, instead);
}
constexpr const char* kUseCpu = "use a CPU context for it";

}  // namespace

void fill_device_info(int32_t device_id, moec_device_info& info) {
  cudaDeviceProp device;
  if (cudaGetDeviceProperties(&device, device_id) != cudaSuccess) return;
  info.compute_major = device.major;
  info.compute_minor = device.minor;
  info.multiprocessors = device.multiProcessorCount;
  info.numa_node = -1;
  info.total_bytes = info.free_bytes = device.totalGlobalMem;
  std::snprintf(info.name, sizeof info.name, "%.127s", device.name);
  std::snprintf(info.backend, sizeof info.backend, "cuda");
  std::snprintf(info.arch, sizeof info.arch, "sm_%d%d", device.major, device.minor);
}

CudaBackend::CudaBackend(const BackendOptions& options) : device_(options.device_id) {
  int major = 0, minor = 0;
  const DeviceScope scope(device_);
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_),
        "compute capability");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device_),
        "compute capability");
  check(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device_),
        "multiprocessor count");
  MOEC_REQUIRE(major == 9 && minor == 0, MOEC_E_UNSUPPORTED,
               "device %d has compute capability %d.%d; the CUDA backend has kernels for 9.0",
               device_, major, minor);
  MOEC_REQUIRE(options.math != MOEC_MATH_TF32, MOEC_E_UNSUPPORTED,
               "math is MOEC_MATH_TF32 (1); the CUDA backend computes bf16 and f16 only");
}

void CudaBackend::device_info(moec_device_info& info) const {
  fill_device_info(device_, info);
  const DeviceScope scope(device_);
  size_t free_bytes = 0, total_bytes = 0;
  if (cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess) info.free_bytes = free_bytes;
}

// ---- memory and time
void* CudaBackend::allocate(uint64_t bytes, moec_stream stream) const {
  const DeviceScope scope(device_);
  void* pointer = nullptr;
  check(cudaMallocAsync(&pointer, bytes, as_stream(stream)), "cudaMallocAsync");
  return pointer;
}
void CudaBackend::release(void* pointer, moec_stream stream) const {
  int before = device_;
  cudaGetDevice(&before);
  cudaSetDevice(device_);
  cudaFreeAsync(pointer, as_stream(stream));
  cudaSetDevice(before);
}
void CudaBackend::copy(void* to, const void* from, uint64_t bytes, moec_stream stream) const {
  const DeviceScope scope(device_);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, as_stream(stream)), "cudaMemcpyAsync");
}
void CudaBackend::copy_to_host(void* to, const void* from, uint64_t bytes,
                               moec_stream stream) const {
  copy(to, from, bytes, stream);
  synchronize(stream);
}
void CudaBackend::copy_from_host(void* to, const void* from, uint64_t bytes,
                                 moec_stream stream) const {
  copy(to, from, bytes, stream);
}
void CudaBackend::zero(void* to, uint64_t bytes, moec_stream stream) const {
  const DeviceScope scope(device_);
  check(cudaMemsetAsync(to, 0, bytes, as_stream(stream)), "cudaMemsetAsync");
}
void CudaBackend::synchronize(moec_stream stream) const {
  const DeviceScope scope(device_);
  check(cudaStreamSynchronize(as_stream(stream)), "cudaStreamSynchronize");
}
moec_status CudaBackend::poll() const {
  const DeviceScope scope(device_);
  return cudaPeekAtLastError() == cudaSuccess ? MOEC_OK : MOEC_E_CUDA;
}
bool CudaBackend::capturing(moec_stream stream) const {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(as_stream(stream), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

// ---- routing
moec_size CudaBackend::router_scratch(const moec_router_desc& desc, int64_t hidden) const {
  const moec_size gate = gate_scratch(desc, hidden), route = route_scratch(desc);
  return {gate.base + route.base, gate.per_token + route.per_token};
}
void CudaBackend::gate_forward(const GateArgs& args, moec_stream stream) const {
  const DeviceScope scope(device_);
  cuda::gate_forward(op(stream), args);
}
void CudaBackend::gate_backward(const GateGradArgs& args, moec_stream stream) const {
  const DeviceScope scope(device_);
  cuda::gate_backward(op(stream), args);
}
void CudaBackend::route_forward(const RouteArgs& args, moec_stream stream) const {
  const DeviceScope scope(device_);
  cuda::route_forward(op(stream), args);
}
void CudaBackend::route_backward(const RouteGradArgs& args, moec_stream stream) const {
  const DeviceScope scope(device_);
  cuda::route_backward(op(stream), args);
}
void CudaBackend::bias_update(const BiasUpdateArgs& args, moec_stream stream) const {
  const DeviceScope scope(device_);
  cuda::bias_update(op(stream), args);
}
void CudaBackend::loss_forward(const LossArgs&, moec_stream) const {
  refuse("losses", kUseCpu);
}
void CudaBackend::loss_backward(const LossArgs&, moec_stream) const {
  refuse("losses", kUseCpu);
}

moec_size CudaBackend::plan_scratch(const moec_plan_desc& desc) const {
  return {plan_scratch_bytes(desc.expert_end - desc.expert_begin), 0};
}
void CudaBackend::build_plan(const PlanSource& source, const PlanView& plan,
                             moec_stream stream) const {
  if (const char* const what = plan_refuses(source, plan)) {
    refuse(what, "build a dropless plan from top-k ids of at most 1024 local experts");
  }
  const DeviceScope scope(device_);
  check(launch_plan(source, plan, as_stream(stream)), "plan");
  count(plan_launches(plan), 0);
}
void CudaBackend::export_map(const PlanView&, int32_t, int32_t*, moec_stream) const {
  refuse("maps of TransformerEngine", kUseCpu);
}

// ---- rows
void CudaBackend::permute(const PermuteArgs&, moec_stream) const {
  refuse("permute", kUseCpu);
}
void CudaBackend::permute_backward(const PermuteGradArgs&, moec_stream) const {
  refuse("the gradient of permute", kUseCpu);
}
void CudaBackend::unpermute_backward(const UnpermuteGradArgs&, moec_stream) const {
  refuse("the gradient of unpermute", kUseCpu);
}
void CudaBackend::unpermute(const UnpermuteArgs& args, moec_stream stream) const {
  CombineParams p = {};
  p.num_tokens = args.plan->num_tokens;
  p.hidden = args.hidden;
  p.num_experts = args.plan->num_experts;
  p.top_k = args.plan->top_k;
  p.rows = args.rows;
  p.assignment_row = args.plan->assignment_row;
  p.weights = args.weights;
  p.residual = args.residual;
  p.scale = 1.0f;
  p.y = args.y;
  if (const char* const what = combine_refuses(p, args.dtype)) {
    refuse(what, "give bf16 or f16 rows aligned to 16 bytes");
  }
  const DeviceScope scope(device_);
  check(launch_combine(p, args.dtype, multiprocessors_, as_stream(stream)), "unpermute");
  count(1, 0);
}

}  // namespace moec::cuda
