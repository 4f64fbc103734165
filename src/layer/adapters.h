// SPDX-License-Identifier: Apache-2.0
// A set of adapters: borrowed factors beside the matrices of a set of experts.
#pragma once

#include <vector>

#include "layer/adapters_bind.h"
#include "layer/context.h"
#include "layer/quantise.h"
#include "layer/weights.h"

namespace moec {

class Adapters final : public Object {
 public:
  static constexpr Kind kKind = Kind::kAdapters;
  Adapters(const Context& context, const moec_adapters_desc& desc);

  const Context& context() const { return *context_; }
  const moec_adapters_desc& desc() const { return desc_; }
  int32_t count() const { return count_; }
  const AdaptersView& view() const;  // throws E_INVALID_STATE when nothing is bound
  void check_memory(TensorCheck& check) const { check.set_in(memory_); }
  // What a forward and its backward must agree on, on top of `seed`.
  uint64_t checksum(uint64_t seed) const;

  void bind(const moec_adapter* list, int32_t count);
  // Adds (sign 1) or subtracts (-1) what is bound to the values of plain weights.
  void merge(const Weights& weights, float sign, moec_stream stream) const;
  // Every expert's matrix with it added into `values`, and codes of those where `quantised` is.
  void merge_copy(const Weights& weights, uint32_t matrix, const moec_tensor& values,
                  const moec_quantise_args* quantised, moec_stream stream) const;

 private:
  void check_fit(const Weights& weights) const;
  Ref<const Context> context_;
  moec_adapters_desc desc_;
  int32_t count_ = 0;
  std::vector<Factors> gate_up_, down_;
  std::vector<MemoryBlock> blocks_;
  MemorySet memory_;
  AdaptersView view_;
};

// Gradients of factors, bound for one call.
class AdapterGradients {
 public:
  AdapterGradients(const Context& context, const Adapters* adapters, const moec_adapter* gradients,
                   TensorCheck& check);
  const AdaptersView* view() const { return given_ ? &view_ : nullptr; }

 private:
  HostArray<Factors> gate_up_, down_;
  HostArray<MemoryBlock> blocks_;
  bool given_;
  MemorySet memory_;
  AdaptersView view_;
};

}  // namespace moec
