// SPDX-License-Identifier: Apache-2.0
#include "backend/cuda/peers/peers.h"

#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#include "backend/cuda/cuda_backend.h"

namespace moec::cuda {
namespace {

using ll = long long;

// What the runtime hands out in one piece, so that nothing else lies in what is exported.
constexpr uint64_t kPage = uint64_t(2) << 20;

class Quiet {  // of a deleter: nothing is thrown, and the caller's device stays
 public:
  explicit Quiet(int device) {
    cudaGetDevice(&before_);
    cudaSetDevice(device);
  }
  ~Quiet() {
    cudaGetLastError();
    cudaSetDevice(before_);
  }
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;

 private:
  const RelaxedCapture relaxed_;
  int before_ = 0;
};

[[noreturn]] void refuse(const PeerTicket& ticket, int device, cudaError_t why) {
  cudaGetLastError();
  fail_native(MOEC_E_UNSUPPORTED, int(why), "cuda:%d does not reach its memory on cuda:%d: %s",
              device, ticket.device_id, cudaGetErrorString(why));
}

// Access is the process's and stays: it is asked for once, since asking again is an error of CUDA
// that a sanitizer reports. Another library may have asked before.
void enable_access(const PeerTicket& ticket, int device) {
  static std::mutex mutex;
  static std::set<std::pair<int, int>> enabled;
  const std::lock_guard lock(mutex);
  if (enabled.count({device, ticket.device_id})) return;
  int reaches = 0;
  check(cudaDeviceCanAccessPeer(&reaches, device, ticket.device_id), "peer access");
  if (!reaches) refuse(ticket, device, cudaErrorPeerAccessUnsupported);
  const cudaError_t result = cudaDeviceEnablePeerAccess(ticket.device_id, 0);
  if (result == cudaErrorPeerAccessAlreadyEnabled)
    cudaGetLastError();
  else if (result != cudaSuccess)
    refuse(ticket, device, result);
  enabled.insert({device, ticket.device_id});
}

}  // namespace

PeerMemory CudaPeers::allocate(uint64_t bytes, PeerTicket& ticket) const {
  static_assert(sizeof(cudaIpcMemHandle_t) == sizeof ticket.handle);
  const DeviceScope scope(device_);
  const RelaxedCapture relaxed;
  void* memory = nullptr;
  const uint64_t whole = (bytes + kPage - 1) / kPage * kPage;
  check(cudaMalloc(&memory, whole), "cudaMalloc of what peers reach");
  PeerMemory owner(memory, {[](void* data, int32_t device) {
                              const Quiet quiet(device);
                              cudaFree(data);
                            },
                            device_});
  check(cudaMemset(memory, 0xff, whole), "cudaMemset of what peers reach");
  ticket.device_type = MOEC_CUDA;
  ticket.device_id = device_;
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, device_), "cudaGetDeviceProperties");
  static_assert(sizeof device.uuid == sizeof ticket.unit);
  std::memcpy(ticket.unit, &device.uuid, sizeof ticket.unit);
  ticket.address = reinterpret_cast<uintptr_t>(memory);
  cudaIpcMemHandle_t handle;
  ticket.is_exported = cudaIpcGetMemHandle(&handle, memory) == cudaSuccess;
  if (!ticket.is_exported) cudaGetLastError();  // threads of this process need no handle
  std::memcpy(ticket.handle, &handle, sizeof handle);
  return owner;
}

void* CudaPeers::adopt(uint64_t bytes, const std::function<void*()>& take) const {
  const DeviceScope scope(device_);
  const RelaxedCapture relaxed;
  void* const memory = take();
  check(cudaMemset(memory, 0xff, bytes), "cudaMemset of a window");
  return memory;
}

PeerMemory CudaPeers::open(const PeerTicket& ticket, bool same_process) const {
  MOEC_REQUIRE(ticket.device_type == MOEC_CUDA, MOEC_E_UNSUPPORTED, "its memory is not on a GPU");
  const DeviceScope scope(device_);
  const RelaxedCapture relaxed;
  if (same_process) {
    void* const memory = reinterpret_cast<void*>(uintptr_t(ticket.address));
    PeerMemory theirs(memory);
    if (ticket.device_id == device_) return theirs;
    enable_access(ticket, device_);
    return theirs;
  }
  MOEC_REQUIRE(ticket.is_exported, MOEC_E_UNSUPPORTED,
               "its driver exports no memory to other processes (CUDA IPC)");
  cudaIpcMemHandle_t handle;
  std::memcpy(&handle, ticket.handle, sizeof handle);
  void* memory = nullptr;
  const cudaError_t opened = cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess);
  if (opened != cudaSuccess) refuse(ticket, device_, opened);
  return {memory,
          {[](void* data, int32_t device) {
             const Quiet quiet(device);
             cudaIpcCloseMemHandle(data);
           },
           device_}};
}

// cudaFree waits for all that is under way, and leaves streams that are captured alone, which
// cudaDeviceSynchronize ends.
void CudaPeers::finish() const {
  const Quiet quiet(device_);
  void* page = nullptr;
  if (cudaMalloc(&page, kPage) == cudaSuccess)
    cudaFree(page);
  else
    cudaDeviceSynchronize();
}

int32_t CudaPeers::crews(const PeerDispatch& step) const {
  return num_blocks(step);
}
int32_t CudaPeers::crews(const PeerCombine& step) const {
  return num_blocks(step);
}

void CudaPeers::run(const PeerDispatch& step, moec_stream stream) const {
  const CudaBackend::Call call(backend_, stream);
  queue(call.op, step);
}
void CudaPeers::run(const PeerCombine& step, moec_stream stream) const {
  const CudaBackend::Call call(backend_, stream);
  queue(call.op, step);
}

}  // namespace moec::cuda
