// SPDX-License-Identifier: Apache-2.0
#include "layer/adapters.h"

#include <memory>
#include <optional>

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

// Factors of part 0 or 1 of the rows that a list adds to.
static bool has_part(const FactorList& list, int part) {
  for (const Factors& f : list)
    if (f.b[part].present()) return true;
  return false;
}

void Adapters::check_fit(const Weights& weights) const {
  using ll = long long;
  check_same_device("weights", weights.context(), *context_);
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
}

void Adapters::merge(const Weights& weights, float sign, moec_stream stream) const {
  const AdaptersView& factors = view();
  check_fit(weights);
  const WeightsView& to = weights.view();
  const struct {
    const ExpertMatrix& matrix;
    const FactorList& list;
    int part;
    int64_t n, k;
    const char* name;
  } rows[] = {{to.gate, factors.gate_up, 0, to.inter, to.hidden, "gate"},
              {to.up, factors.gate_up, 1, to.inter, to.hidden, "up"},
              {to.down, factors.down, 0, to.hidden, to.inter, "down"}};
  for (const auto& row : rows)
    MOEC_REQUIRE(!has_part(row.list, row.part) || !row.matrix.is_coded(), MOEC_E_UNSUPPORTED,
                 "%s of the weights is quantised; moec_adapters_merge_copy merges into a copy",
                 row.name);
  TensorCheck check(*context_);
  weights.check_written(check);
  check_memory(check);
  check.finish();
  for (const auto& row : rows)
    if (has_part(row.list, row.part))
      context_->backend().run(
          MergeArgs{&row.matrix, row.n, row.k, desc_.num_experts, &row.list, row.part, sign},
          stream);
}

void Adapters::merge_copy(const Weights& weights, uint32_t matrix, const moec_tensor& values,
                          const moec_quantise_args* quantised, moec_stream stream) const {
  const AdaptersView& factors = view();
  check_fit(weights);
  const Weights::Form form = weights.form(matrix);
  const FactorList& list = matrix == MOEC_MATRIX_DOWN ? factors.down : factors.gate_up;
  bool has_any = false;
  for (int32_t i = 0; i < form.count; ++i) has_any |= has_part(list, form.parts[i].is_up);
  MOEC_REQUIRE(has_any, MOEC_E_INVALID_ARG,
               "matrix is %u; no bound adapter has factors of it, so that nothing is merged",
               matrix);
  TensorCheck check(*context_);
  const Array out =
      check.out("values", values, {desc_.num_experts, form.rows(), form.cols()}, kReal);
  weights.check_memory(check);
  check_memory(check);
  check.finish();
  std::optional<Quantisation> made;
  Quantisation::Memory memory;
  if (quantised) {
    MOEC_REQUIRE(is_absent(quantised->source), MOEC_E_INVALID_ARG,
                 "quantised.source is given; expected none: it is values");
    MOEC_REQUIRE(quantised->desc->orientation == (form.in_out ? MOEC_IN_OUT : MOEC_OUT_IN),
                 MOEC_E_MISMATCH,
                 "quantised.desc.orientation is %u; values are in %d, as the weights",
                 quantised->desc->orientation, form.in_out ? MOEC_IN_OUT : MOEC_OUT_IN);
    moec_quantise_args args = *quantised;
    args.source = values;
    made.emplace(*args.desc);
    memory = made->checked(*context_, args);
  }
  for (int32_t i = 0; i < form.count; ++i) {
    const Weights::Form::Part& part = form.parts[i];
    const ExpertMatrix to = form.plain(part, out.data, out.dtype);
    for (int32_t e = 0; e < desc_.num_experts; ++e)
      context_->backend().run(ValuesArgs{part.from, e, part.rows, form.k, to.expert(e)}, stream);
    if (has_part(list, part.is_up))
      context_->backend().run(
          MergeArgs{&to, part.rows, form.k, desc_.num_experts, &list, part.is_up, 1}, stream);
  }
  if (made) made->run(*context_, memory, stream);
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
