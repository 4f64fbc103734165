// SPDX-License-Identifier: Apache-2.0
// What the runs of an EpProblem share: tensors of its values, bound weights, batches.
#pragma once

#include <algorithm>

#include "ep_problem.h"
#include "tensors.h"

namespace moec::test {

using oracle::Vec;

inline constexpr double kBefore = 0.25;

inline uint64_t bytes_for(const moec_size& size, int64_t tokens) {
  return size.base + static_cast<uint64_t>(tokens) * size.per_token;
}

template <typename Value>
std::vector<Value> joined(const std::vector<std::vector<Value>>& parts) {
  std::vector<Value> all;
  for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

// Memory of one run.
class Memory : public Tensors {
 public:
  explicit Memory(const EpProblem& problem) : p_(problem) {}
  // Of no values: an empty tensor that is there.
  moec_tensor in(const Vec& values, moec_dtype dtype, const std::vector<int64_t>& shape) {
    return values.empty() ? output(dtype, shape) : input(values, dtype, shape);
  }
  moec_tensor parameter(const Vec& values, moec_dtype dtype, const std::vector<int64_t>& shape) {
    return input(values, dtype, shape);  // absent without values
  }
  // What a gradient is added to, or written over.
  moec_tensor gradient(moec_dtype dtype, const std::vector<int64_t>& shape) {
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    if (!p_.accumulate || count == 0) return output(dtype, shape);
    return input(Vec(static_cast<size_t>(count), kBefore), dtype, shape);
  }
  uint32_t grad_flags() const {
    return p_.accumulate ? MOEC_GRAD_ACCUMULATE | MOEC_GRAD_ACCUMULATE_X : 0;
  }
  Vec values(const moec_tensor& t) const { return moec_tensor_numel(&t) ? read(t) : Vec{}; }
  std::vector<uint8_t> raw(const moec_tensor& t) const {
    return moec_tensor_numel(&t) ? read_bytes(t) : std::vector<uint8_t>{};
  }

 private:
  const EpProblem& p_;
};

// Experts' weights bound, and where their gradients go. Those of codes have gradients of biases
// alone.
struct BoundMlp {
  BoundMlp(const EpProblem& p, const moec_context* context, const oracle::MlpWeights& values,
           int experts, int inter, const CodedExperts& codes = {}) {
    WeightLayout layout;
    layout.dtype = p.dtype;
    if (!codes.up.empty() && codes.up[0].in_out)
      layout.gate_up_orientation = layout.down_orientation = MOEC_IN_OUT;
    plain = std::make_unique<WeightSet>(values, experts, p.hidden, inter, layout, false);
    layout.dtype = p.grad_dtype;
    gradients = std::make_unique<WeightSet>(values, experts, p.hidden, inter, layout, true,
                                            p.accumulate ? &kBefore : nullptr);
    moec_weights_desc desc = plain->desc(false);
    moec_weight_set set = *plain->set();
    d_set = *gradients->set();
    const auto replace = [&](const QuantisedMatrix& from, moec_matrix moec_weight_set::* matrix,
                             uint32_t& scheme) {
      if (from.empty()) return;
      const moec_tensor bias = (set.*matrix).bias;
      set.*matrix = binder.matrix(from, from[0].scheme == oracle::Scheme::kMxfp4);
      (set.*matrix).bias = bias;
      (d_set.*matrix).data = {};
      scheme = uint32_t(from[0].scheme);
    };
    replace(codes.gate, &moec_weight_set::gate, desc.gate_up_scheme);
    replace(codes.up, &moec_weight_set::up, desc.gate_up_scheme);
    replace(codes.down, &moec_weight_set::down, desc.down_scheme);
    handle = make<Weights>(moec_weights_create, context, &desc);
    check(moec_weights_bind(handle.get(), &set));
  }
  Tensors memory;
  QuantBinder binder{memory};
  std::unique_ptr<WeightSet> plain, gradients;
  moec_weight_set d_set{};
  Weights handle;
};

// The routed experts [begin, end).
struct BoundRange {
  BoundRange(const EpProblem& p, const moec_context* context, int begin, int end)
      : mlp(p, context, p.weights_of(begin, end), end - begin, p.inter, p.codes_of(begin, end)) {
    if (p.adapters.empty()) return;
    const std::vector<oracle::Adapter> own = p.adapters_of(begin, end);
    AdapterLayout layout = p.adapter_layout;
    const auto set = [&](const double* before) {
      return std::make_unique<AdapterSet>(own, end - begin, p.hidden, p.inter, layout, before);
    };
    factors = set(nullptr);
    layout.dtype = MOEC_F32;
    const double zero = 0;
    d_factors = set(p.accumulate ? &kBefore : &zero);
    const moec_adapters_desc desc = factors->desc();
    adapters = make<Adapters>(moec_adapters_create, context, &desc);
    const std::vector<moec_adapter>& list = factors->list();
    check(moec_adapters_bind(adapters.get(), list.data(), static_cast<int32_t>(list.size())));
  }
  const moec_adapter* d_list() const { return d_factors ? d_factors->list().data() : nullptr; }
  // Of each A that all experts have.
  Vec d_shared_a() const {
    Vec all;
    for (const oracle::Adapter& one : d_factors->read())
      for (const oracle::Factors* f : {&one.gate, &one.up, &one.down})
        all.insert(all.end(), f->a.begin(), f->a.end());
    return all;
  }
  BoundMlp mlp;
  std::unique_ptr<AdapterSet> factors, d_factors;
  Adapters adapters;
};

struct Batch {
  int64_t tokens;
  Vec x, d_y, residual;
  std::vector<int> mask, adapter_ids;
  uint64_t rng_offset;
};
inline Batch batch_of(const EpProblem& p, int rank) {
  const auto r = static_cast<size_t>(rank);
  Batch b{p.tokens[r], p.x[r], p.d_y[r], {}, {}, {}, 0};
  if (!p.residual.empty()) b.residual = p.residual[r];
  if (!p.token_mask.empty()) b.mask = p.token_mask[r];
  if (!p.adapter_ids.empty()) b.adapter_ids = p.adapter_ids[r];
  for (size_t before = 0; before < r; ++before)
    b.rng_offset += static_cast<uint64_t>(p.tokens[before]) * static_cast<uint64_t>(p.hidden);
  return b;
}
inline Batch all_of(const EpProblem& p) {
  const Vec x = joined(p.x);
  return {static_cast<int64_t>(x.size()) / p.hidden,
          x,
          joined(p.d_y),
          joined(p.residual),
          joined(p.token_mask),
          joined(p.adapter_ids),
          0};
}

}  // namespace moec::test
