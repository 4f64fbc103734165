// SPDX-License-Identifier: Apache-2.0
// The packed copy of the CPU: gate, up, down and biases of a set of experts, as packed_layout.h has
// them, plain matrices in the forms of packed_form.h. expert_weights.cpp has its code.
#pragma once

#include "backend/weight_packing.h"
#include "core/thread_pool.h"

namespace moec::cpu {

class CpuPacking final : public WeightPacking {
 public:
  explicit CpuPacking(const ThreadPool& pool) : pool_(pool) {}  // which lives as long

  bool takes(const WeightsView&) const override { return true; }
  uint64_t bytes(const WeightsView& weights) const override;
  // The same bytes on every machine and instruction set.
  std::string format(const WeightsView& weights) const override;
  void pack(const WeightsView& weights, void* to, int32_t first, int32_t count,
            moec_stream) const override;
  WeightsView view(const WeightsView& weights, const void* head, const void* packed,
                   uint64_t bytes) const override;
  void unpack(const WeightsView& packed, const WeightsView& to, moec_stream) const override;

 private:
  const ThreadPool& pool_;
};

}  // namespace moec::cpu
