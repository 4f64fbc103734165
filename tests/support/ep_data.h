// SPDX-License-Identifier: Apache-2.0
// What the runs of an EpProblem share: tensors of its values, bound weights, batches.
#pragma once

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

// Experts' weights bound, and where their gradients go.
struct BoundMlp {
  BoundMlp(const EpProblem& p, const moec_context* context, const oracle::MlpWeights& values,
           int experts, int inter) {
    WeightLayout layout;
    layout.dtype = p.dtype;
    set = std::make_unique<WeightSet>(values, experts, p.hidden, inter, layout, false);
    const moec_weights_desc desc = set->desc(false);
    handle = make<Weights>(moec_weights_create, context, &desc);
    check(moec_weights_bind(handle.get(), set->set()));
    layout.dtype = p.grad_dtype;
    gradients = std::make_unique<WeightSet>(values, experts, p.hidden, inter, layout, true,
                                            p.accumulate ? &kBefore : nullptr);
  }
  std::unique_ptr<WeightSet> set, gradients;
  Weights handle;
};

struct Batch {
  int64_t tokens;
  Vec x, d_y, residual;
  std::vector<int> mask;
  uint64_t rng_offset;
};
inline Batch batch_of(const EpProblem& p, int rank) {
  const auto r = static_cast<size_t>(rank);
  Batch b{p.tokens[r], p.x[r], p.d_y[r], {}, {}, 0};
  if (!p.residual.empty()) b.residual = p.residual[r];
  if (!p.token_mask.empty()) b.mask = p.token_mask[r];
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
          0};
}

}  // namespace moec::test
