// SPDX-License-Identifier: Apache-2.0
// A GPU as a Backend: identity and memory. The experts run by the paths of experts/cuda_path.h.
// What has no kernel yet is refused with a reason, never computed elsewhere.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "backend/backend.h"
#include "backend/cuda/device/check.h"
#include "backend/cuda/device/op.h"
#include "backend/cuda/experts/cuda_path.h"
#include "backend/cuda/peers/peers.h"

namespace moec::cuda {

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(const BackendOptions& options);

  const char* name() const override { return "cuda"; }
  int32_t device_type() const override { return MOEC_CUDA; }
  void device_info(moec_device_info& info) const override;
  void set_host(const HostServices& host) override { host_ = host; }

  void* allocate(uint64_t bytes, Place place, moec_stream stream) const override;
  void release(void* pointer, moec_stream stream) const override;
  void copy(void* to, const void* from, uint64_t bytes, moec_stream stream) const override;
  void store(void* to, const void* from, uint64_t bytes, moec_stream stream) const override;
  void zero(void* to, uint64_t bytes, moec_stream stream) const override;
  void synchronize(moec_stream stream) const override;
  moec_status poll() const override;
  bool reaches(const void* pointer) const override;
  bool capturing(moec_stream stream) const override;
  uint64_t stream_id(moec_stream stream) const override;

  void run(const Operation& operation, moec_stream stream) const override;
  void prepare_router(const moec_router_desc& desc) const override;
  moec_size router_scratch(const moec_router_desc& desc, int64_t hidden) const override;
  moec_size plan_scratch(const moec_plan_desc& desc) const override;

  ExpertsPaths experts_paths() const override { return paths_; }
  const WeightPacking* packing() const override { return nullptr; }

  void between_ranks(const RankStep& step, moec_stream stream) const override;
  const PeerDevice& peers() const override { return peers_; }

  int multiprocessors() const { return multiprocessors_; }
  // The device and the stream of one call, while it queues.
  struct Call {
    Call(const CudaBackend& backend, moec_stream stream)
        : scope(backend.device_), op(backend.op(stream)) {}
    const DeviceScope scope;
    const Op op;
  };

 private:
  void count(uint64_t kernels, uint64_t flops) const {
    if (host_.count_launch) host_.count_launch(host_.self, kernels, flops);
  }

  Op op(moec_stream stream) const {
    return {host_, multiprocessors_,  clusters_,
            tf32_, deferred_->data(), static_cast<cudaStream_t>(stream)};
  }

  int device_, multiprocessors_ = 0;
  int pageable_ = 0;  // kernels read any host memory of the process
  bool tf32_ = false;
  PathList own_paths_;  // that this device has and MOEC_CUDA_KERNELS allows
  std::vector<const ExpertsPath*> paths_;
  bool clusters_ = false;
  std::unique_ptr<Deferred> deferred_;
  HostServices host_ = {};
  const CudaPeers peers_{*this, device_};
};

// What the plug-in and a backend say about a device.
void fill_device_info(int32_t device_id, moec_device_info& info);

}  // namespace moec::cuda
