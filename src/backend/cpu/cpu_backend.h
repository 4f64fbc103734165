// SPDX-License-Identifier: Apache-2.0
// The CPU as a Backend: identity and memory here, every operation forwarded to ops.h. All work is
// done when a call returns, on the threads of one pool; streams are ignored.
#pragma once

#include "backend/backend.h"
#include "backend/cpu/experts_path.h"
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
  void check_router(const moec_router_desc&) const override {}  // all of them run here

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

  moec_size router_scratch(const moec_router_desc& desc, int64_t hidden) const override {
    return cpu::router_scratch(device(), desc, hidden);
  }
  void gate_forward(const GateArgs& args, moec_stream) const override;
  void gate_backward(const GateGradArgs& args, moec_stream) const override;
  void route_forward(const RouteArgs& args, moec_stream) const override;
  void route_backward(const RouteGradArgs& args, moec_stream) const override;
  void bias_update(const BiasUpdateArgs& args, moec_stream) const override;
  void loss_forward(const LossArgs& args, moec_stream) const override;
  void loss_backward(const LossArgs& args, moec_stream) const override;
  moec_size plan_scratch(const moec_plan_desc& desc) const override;
  void build_plan(const PlanSource& source, const PlanView& plan, moec_stream) const override;
  void export_map(const PlanView& plan, int32_t field, int32_t* to, moec_stream) const override;

  void permute(const PermuteArgs& args, moec_stream) const override;
  void unpermute(const UnpermuteArgs& args, moec_stream) const override;
  void permute_backward(const PermuteGradArgs& args, moec_stream) const override;
  void unpermute_backward(const UnpermuteGradArgs& args, moec_stream) const override;
  void between_ranks(const RankStep& step, moec_stream) const override;
  const PeerDevice& peers() const override { return peers_; }

  ExpertsPaths experts_paths() const override;

  WeightsView packed_view(const WeightsView& weights, const void* packed,
                          uint64_t bytes) const override;
  void unpack_weights(const WeightsView& packed, const WeightsView& to,
                      moec_stream stream) const override;
  PackedForm packed_form(const WeightsView& weights) const override;
  void pack_weights(const WeightsView& weights, void* to, int32_t first, int32_t count,
                    moec_stream) const override;
  void weight_values(const ValuesArgs& args, moec_stream) const override;
  void merge_factors(const MergeArgs& args, moec_stream) const override;
  void quantise(const QuantiseArgs& args, moec_stream) const override;

 private:
  Device device() const { return {pool_, &host_}; }

  ThreadPool pool_;
  HostServices host_ = {};
  const CpuPeers peers_{};
  const CpuExperts experts_{pool_, host_};
  const ExpertsPath* const experts_path_ = &experts_;
};

}  // namespace moec::cpu
