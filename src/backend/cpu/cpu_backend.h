// SPDX-License-Identifier: Apache-2.0
// The CPU as a Backend: identity and memory here, every operation forwarded to ops.h. All work is
// done when a call returns, on the threads of one pool; streams are ignored.
#pragma once

#include "backend/backend.h"
#include "backend/cpu/experts_path.h"
#include "backend/cpu/packing.h"
#include "backend/cpu/peers.h"
#include "core/thread_pool.h"

namespace moec::cpu {

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const BackendOptions& options) : pool_(options.num_threads, options.pool) {}

  const char* name() const override { return "cpu"; }
  int32_t device_type() const override { return MOEC_CPU; }
  void device_info(moec_device_info& info) const override;
  void set_host(const HostServices& host) override { host_ = host; }

  void* allocate(uint64_t bytes, Place, moec_stream) const override;
  void release(void* pointer, moec_stream) const override;
  void copy(void* to, const void* from, uint64_t bytes, moec_stream) const override;
  void store(void* to, const void* from, uint64_t bytes, moec_stream) const override;
  void zero(void* to, uint64_t bytes, moec_stream) const override;
  void synchronize(moec_stream) const override {}
  moec_status poll() const override { return MOEC_OK; }
  bool reaches(const void*) const override { return true; }
  bool capturing(moec_stream) const override { return false; }
  uint64_t stream_id(moec_stream) const override { return 1; }

  void run(const Operation& operation, moec_stream) const override;
  void prepare_router(const moec_router_desc&) const override {}
  moec_size router_scratch(const moec_router_desc& desc, int64_t hidden) const override;
  moec_size plan_scratch(const moec_plan_desc& desc) const override;

  ExpertsPaths experts_paths() const override { return {&experts_path_, 1}; }
  const WeightPacking* packing() const override { return &packing_; }

  void between_ranks(const RankStep& step, moec_stream) const override;
  const PeerDevice& peers() const override { return peers_; }

 private:
  Device device() const { return {pool_, &host_}; }

  ThreadPool pool_;
  HostServices host_ = {};
  const CpuPacking packing_{pool_};
  const CpuPeers peers_{};
  const CpuExperts experts_{pool_, host_};
  const ExpertsPath* const experts_path_ = &experts_;
};

}  // namespace moec::cpu
