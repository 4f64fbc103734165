// SPDX-License-Identifier: Apache-2.0
// The operations of the CPU backend: one free function each, in the file of the same stem.
// CpuBackend only forwards to them. Arguments are validated; results have the same bits for every
// thread count.
#pragma once

#include <cstdint>

#include "backend/args.h"
#include "backend/host_services.h"
#include "core/thread_pool.h"

namespace moec {

struct QuantiseArgs;  // quantise_args.h
struct RankStep;      // rank_steps.h

namespace cpu {

struct Device {
  const ThreadPool& pool;
  const HostServices* host;  // null only before set_host()
};

// Scratch of one call, from the context's cache; given back on scope exit. 64-byte aligned.
class Scratch {
 public:
  Scratch(const Device& device, uint64_t bytes)
      : host_(device.host), data_(bytes ? host_->acquire(host_->self, bytes, nullptr) : nullptr) {}
  ~Scratch() {
    if (data_) host_->release(host_->self, data_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* data() const { return data_; }

 private:
  const HostServices* host_;
  void* data_;
};

// ---- gate.cpp, route_forward.cpp, route_backward.cpp, loss.cpp
moec_size router_scratch(const Device& device, const moec_router_desc& desc, int64_t hidden);
void gate_forward(const Device& device, const GateArgs& args);
void gate_backward(const Device& device, const GateGradArgs& args);
void route_forward(const Device& device, const RouteArgs& args);
void route_backward(const Device& device, const RouteGradArgs& args);
void bias_update(const Device& device, const BiasUpdateArgs& args);
void loss_forward(const Device& device, const LossArgs& args);
void loss_backward(const Device& device, const LossArgs& args);

// ---- plan.cpp
moec_size plan_scratch(const Device& device, const moec_plan_desc& desc);
void build_plan(const Device& device, const PlanSource& source, const PlanView& plan);
void export_map(const Device& device, const PlanView& plan, int32_t field, int32_t* to);

// ---- permute.cpp
void permute(const Device& device, const PermuteArgs& args);
void unpermute(const Device& device, const UnpermuteArgs& args);
void permute_backward(const Device& device, const PermuteGradArgs& args);
void unpermute_backward(const Device& device, const UnpermuteGradArgs& args);

// ---- rank_steps.cpp
void between_ranks(const Device& device, const RankStep& step);

// ---- weight_values.cpp
void weight_values(const Device& device, const ValuesArgs& args);

// ---- quantise.cpp
void quantise(const Device& device, const QuantiseArgs& args);

// ---- cpu_backend.cpp
const char* isa_name();  // the instruction set in use, such as "amx"

}  // namespace cpu
}  // namespace moec
