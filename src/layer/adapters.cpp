// SPDX-License-Identifier: Apache-2.0
#include "layer/adapters.h"

#include <memory>

#include "core/checksum.h"

namespace moec {

Adapters::Adapters(const Context& context, const moec_adapters_desc& desc)
    : Object(kKind), context_(context), desc_(checked_adapters_desc(desc)) {}

const AdaptersView& Adapters::view() const {
  MOEC_REQUIRE(count_, MOEC_E_INVALID_STATE,
               "adapters are not bound; call moec_adapters_bind before");
  return view_;
}

void Adapters::bind(const moec_adapter* list, int32_t count) {
  check_range("count", count, 1, kMostAdapters);
  std::vector<Factors> gate_up(size_t(count * kGateUpFactors)), down(size_t(count * kDownFactors));
  std::vector<MemoryBlock> blocks(size_t(count * kFactorTensors));
  FactorMemory memory = {gate_up.data(), down.data(), {"adapters", blocks.data()}};
  view_ = bind_adapters(*context_, desc_, list, count, memory);
  gate_up_.swap(gate_up);
  down_.swap(down);
  blocks_.swap(blocks);
  memory_ = memory.set;
  count_ = count;
}

uint64_t Adapters::checksum(uint64_t seed) const {
  uint64_t sum = seed;
  for (const FactorList* list : {&view_.gate_up, &view_.down})
    for (const Factors& f : *list) {
      const struct {
        int64_t rank;
        int32_t adapter;
        float scale;
        bool b[2], padding[6];
      } parts = {f.rank, f.adapter, f.scale, {f.b[0].present(), f.b[1].present()}, {}};
      sum = moec::checksum(&parts, sizeof parts, sum);
    }
  return sum;
}

void Adapters::merge(const Weights& weights, float sign, moec_stream stream) const {
  using ll = long long;
  check_same_device("weights", weights.context(), *context_);
  const AdaptersView& factors = view();
  const WeightsView& to = weights.view();
  MOEC_REQUIRE(to.source_present, MOEC_E_INVALID_STATE,
               "the source of the weights was released; call moec_weights_bind before");
  MOEC_REQUIRE(to.num_experts == desc_.num_experts && to.hidden == desc_.hidden &&
                   to.inter == desc_.inter && to.gated == (desc_.gate_layout != MOEC_GATE_NONE),
               MOEC_E_MISMATCH,
               "adapters are of %d %s experts of H, I = %lld, %lld; the weights have %d %s of "
               "%lld, %lld",
               desc_.num_experts, desc_.gate_layout == MOEC_GATE_NONE ? "plain" : "gated",
               ll(desc_.hidden), ll(desc_.inter), to.num_experts, to.gated ? "gated" : "plain",
               ll(to.hidden), ll(to.inter));
  const struct {
    const ExpertMatrix& matrix;
    const FactorList& list;
    int part;
    int64_t n, k;
    const char* name;
  } rows[] = {{to.gate, factors.gate_up, 0, to.inter, to.hidden, "gate"},
              {to.up, factors.gate_up, 1, to.inter, to.hidden, "up"},
              {to.down, factors.down, 0, to.hidden, to.inter, "down"}};
  const auto has_part = [](const FactorList& list, int part) {
    for (const Factors& f : list)
      if (f.b[part].present()) return true;
    return false;
  };
  for (const auto& row : rows)
    MOEC_REQUIRE(!has_part(row.list, row.part) || !row.matrix.is_coded(), MOEC_E_UNSUPPORTED,
                 "%s of the weights is quantised; merge into a copy of its values "
                 "(moec_weights_dequantise) and quantise that again",
                 row.name);
  TensorCheck check(*context_);
  weights.check_written(check);
  check_memory(check);
  check.finish();
  for (const auto& row : rows)
    if (has_part(row.list, row.part))
      context_->backend().merge_factors(
          {&row.matrix, row.n, row.k, desc_.num_experts, &row.list, row.part, sign}, stream);
}

AdapterGradients::AdapterGradients(const Context& context, const Adapters* adapters,
                                   const moec_adapter* gradients, TensorCheck& check)
    : gate_up_(context, gradients && adapters ? adapters->count() * kGateUpFactors : 0),
      down_(context, gradients && adapters ? adapters->count() * kDownFactors : 0),
      blocks_(context, gradients && adapters ? adapters->count() * kFactorTensors : 0),
      given_(gradients != nullptr) {
  if (!gradients) return;
  MOEC_REQUIRE(adapters, MOEC_E_INVALID_ARG, "d_adapters is given; there are no such adapters");
  const AdaptersView& values = adapters->view();
  std::uninitialized_default_construct_n(gate_up_.data(), adapters->count() * kGateUpFactors);
  std::uninitialized_default_construct_n(down_.data(), adapters->count() * kDownFactors);
  FactorMemory memory = {gate_up_.data(), down_.data(), {"d_adapters", blocks_.data()}};
  view_ = bind_adapter_gradients(context, adapters->desc(), gradients, adapters->count(), values,
                                 memory);
  memory_ = memory.set;
  check.set_out(memory_);
}

}  // namespace moec
