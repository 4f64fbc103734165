// SPDX-License-Identifier: Apache-2.0
#include "adapter_set.h"

#include "golden/golden_case.h"

namespace moec::test {
namespace {

using oracle::Factors;
using oracle::Vec;

constexpr double kGap = 7;  // between elements

// b of gate and of up as that of one matrix, and back.
golden::Stack both_of(int experts, int inter, int rank) {
  return {experts, 2 * inter, rank, false};
}

}  // namespace

AdapterSet::AdapterSet(const std::vector<oracle::Adapter>& values, int experts, int hidden,
                       int inter, const AdapterLayout& layout, const double* before)
    : experts_(experts),
      hidden_(hidden),
      inter_(inter),
      layout_(layout),
      before_(before ? &before_value_ : nullptr),
      before_value_(before ? *before : 0),
      shapes_(values),
      stored_(values.size(), std::vector<Stored>(6)) {
  for (size_t i = 0; i < values.size(); ++i) {
    const oracle::Adapter& from = values[i];
    std::vector<Stored>& stored = stored_[i];
    moec_adapter to{};
    if (layout.fused && from.gate.rank) {
      Factors both = from.gate;
      both.b = golden::join_gate_up(both_of(experts, inter, both.rank),
                                    static_cast<golden::GateLayout>(layout.gate_layout),
                                    from.gate.b, from.up.b);
      to.gate_up = factors(both, 2 * inter, hidden, &stored[0]);
    } else {
      to.gate = factors(from.gate, inter, hidden, &stored[0]);
      to.up = factors(from.up, inter, hidden, &stored[2]);
    }
    to.down = factors(from.down, hidden, inter, &stored[4]);
    list_.push_back(to);
  }
}

moec_adapters_desc AdapterSet::desc() const {
  moec_adapters_desc d;
  moec_struct_init(&d, sizeof(d));
  d.num_experts = experts_;
  d.gate_layout = layout_.gate_layout;
  d.hidden = hidden_;
  d.inter = inter_;
  return d;
}

moec_factors AdapterSet::factors(const Factors& from, int64_t n, int64_t k, Stored* stored) {
  moec_factors to{};
  if (!from.rank) return to;
  const int64_t rank = from.rank, of_a = layout_.one_for_all ? 1 : experts_;
  const Vec a(from.a.begin(), from.a.begin() + of_a * rank * k);
  to.a = tensor(a, of_a, rank, k, false, &stored[0]);
  to.b = tensor(from.b, experts_, n, rank, true, &stored[1]);
  if (!before_) to.scale = static_cast<float>(from.scale);
  return to;
}

moec_tensor AdapterSet::tensor(const Vec& values, int64_t experts, int64_t n, int64_t k, bool is_b,
                               Stored* stored) {
  int64_t strides[3] = {n * k, k, 1};
  const auto set = [&](int64_t e, int64_t of_n, int64_t of_k) {
    strides[0] = e;
    strides[1] = of_n;
    strides[2] = of_k;
  };
  if (layout_.storage == FactorStorage::kPeft && is_b) set(1, k * experts, experts);
  if (layout_.storage == FactorStorage::kTurned) set(n * k, 1, n);
  if (layout_.storage == FactorStorage::kGaps) set(n * (k + 3) + 5, k + 3, 1);
  int64_t size = 1;
  const int64_t extents[3] = {experts, n, k};
  for (int i = 0; i < 3; ++i) size += (extents[i] - 1) * strides[i];
  Vec memory(static_cast<size_t>(size), kGap);
  stored->place.clear();
  for (int64_t e = 0; e < experts; ++e)
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < k; ++j) {
        const auto at = static_cast<size_t>(e * strides[0] + i * strides[1] + j * strides[2]);
        memory[at] = before_ ? *before_ : values[stored->place.size()];
        stored->place.push_back(at);
      }
  stored->memory = tensors_.input(memory, layout_.dtype, {size});
  moec_tensor t = stored->memory;
  t.ndim = 3;
  for (int i = 0; i < 3; ++i) {
    t.shape[i] = extents[i];
    t.strides[i] = strides[i];
  }
  if (layout_.one_for_all && !is_b && layout_.storage == FactorStorage::kGaps) {
    t.shape[0] = experts_;  // the other way to say so
    t.strides[0] = 0;
  }
  return t;
}

Vec AdapterSet::values_of(const Stored& stored, double less) const {
  const Vec memory = tensors_.read(stored.memory);
  Vec values;
  for (const size_t at : stored.place) values.push_back(memory[at] - less);
  return values;
}

std::vector<oracle::Adapter> AdapterSet::read(double less) const {
  std::vector<oracle::Adapter> all = shapes_;
  for (size_t i = 0; i < all.size(); ++i) {
    const auto read = [&](Factors* to, const Stored* from) {
      if (!to->rank || !from[0].memory.data) return;
      to->a = values_of(from[0], less);
      to->b = values_of(from[1], less);
    };
    const std::vector<Stored>& stored = stored_[i];
    read(&all[i].gate, &stored[0]);
    read(&all[i].down, &stored[4]);
    if (layout_.fused && all[i].gate.rank) {
      const Vec both = all[i].gate.b;
      golden::split_gate_up(both_of(experts_, inter_, all[i].gate.rank),
                            static_cast<golden::GateLayout>(layout_.gate_layout), both,
                            &all[i].gate.b, &all[i].up.b);
      all[i].up.a.assign(all[i].gate.a.size(), 0.0);
    } else {
      read(&all[i].up, &stored[2]);
    }
  }
  return all;
}

std::vector<uint8_t> AdapterSet::bytes() const {
  std::vector<uint8_t> all;
  for (const auto& adapter : stored_)
    for (const Stored& s : adapter) {
      if (!s.memory.data) continue;
      const std::vector<uint8_t> one = tensors_.read_bytes(s.memory);
      all.insert(all.end(), one.begin(), one.end());
    }
  return all;
}

bool AdapterSet::neighbours_untouched() const {
  for (const auto& adapter : stored_)
    for (const Stored& s : adapter) {
      if (!s.memory.data) continue;
      Vec memory = tensors_.read(s.memory);
      for (const size_t at : s.place) memory[at] = kGap;
      for (const double value : memory)
        if (value != kGap) return false;
    }
  return tensors_.neighbours_untouched();
}

}  // namespace moec::test
