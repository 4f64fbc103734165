// SPDX-License-Identifier: Apache-2.0
#include "weight_sets.h"

#include <algorithm>

#include "golden/golden_case.h"

namespace moec::test {
namespace {

using golden::GateLayout;
using oracle::Vec;
static_assert(static_cast<uint32_t>(GateLayout::kSplit) == MOEC_GATE_SPLIT &&
              static_cast<uint32_t>(GateLayout::kGateThenUp) == MOEC_GATE_THEN_UP &&
              static_cast<uint32_t>(GateLayout::kUpThenGate) == MOEC_UP_THEN_GATE &&
              static_cast<uint32_t>(GateLayout::kInterleaved) == MOEC_GATE_INTERLEAVED &&
              static_cast<uint32_t>(GateLayout::kNone) == MOEC_GATE_NONE);

// Codes in the place of a matrix, whose bias stays.
void put_codes(const moec_matrix& from, moec_matrix* to) {
  if (!from.data.data && !from.per_expert) return;
  to->data = from.data;
  to->per_expert = from.per_expert;
  to->quant = from.quant;
  to->count = std::max(from.count, to->count);
}

bool is_one_matrix(uint32_t gate_layout) {
  return gate_layout != MOEC_GATE_SPLIT && gate_layout != MOEC_GATE_NONE;
}

}  // namespace

WeightSet::WeightSet(const oracle::MlpWeights& w, int experts, int hidden, int inter,
                     const WeightLayout& layout, bool as_output, const double* before)
    : experts_(experts),
      hidden_(hidden),
      inter_(inter),
      layout_(layout),
      has_gate_up_bias_(!w.up_bias.empty()),
      has_down_bias_(!w.down_bias.empty()),
      before_(before) {
  moec_struct_init(&set_, sizeof(set_));
  if (w.gate.empty() && !w.up.empty()) layout_.gate_layout = MOEC_GATE_NONE;
  const oracle::CodedMlp plain, &codes = layout.codes ? *layout.codes : plain;
  const BoundCodes none, &bound = layout.bound ? *layout.bound : none;
  const auto scheme_of = [](const oracle::Coded& coded, uint32_t given) {
    return coded.codes.empty() ? given : uint32_t{MOEC_SCHEME_INT8};
  };
  gate_up_scheme_ = scheme_of(codes.up, bound.gate_up_scheme);
  down_scheme_ = scheme_of(codes.down, bound.down_scheme);
  if (bound.gate_up_scheme) layout_.gate_up_orientation = bound.gate_up_orientation;
  if (bound.down_scheme) layout_.down_orientation = bound.down_orientation;
  const auto values_of = [](const Vec& v, const oracle::Coded& coded, uint32_t given) {
    return given ? Vec{} : coded.codes.empty() ? v : coded.codes;
  };
  const bool in_out = layout_.gate_up_orientation == MOEC_IN_OUT;
  if (is_one_matrix(layout_.gate_layout)) {
    const auto kind = static_cast<GateLayout>(layout_.gate_layout);
    const auto column = [&](const Vec& gate, const Vec& up) {
      if (up.empty()) return Vec{};
      return golden::join_gate_up({experts, 2 * inter, 1, false}, kind, gate, up);
    };
    const Values values = {golden::join_gate_up({experts, 2 * inter, hidden, in_out}, kind,
                                                values_of(w.gate, codes.gate, bound.gate_up_scheme),
                                                values_of(w.up, codes.up, bound.gate_up_scheme)),
                           column(w.gate_bias, w.up_bias),
                           column(codes.gate.scales, codes.up.scales),
                           column(codes.gate.zeros, codes.up.zeros)};
    set_.gate_up = matrix(values, 2 * inter, hidden, in_out, as_output, &gate_up_);
  } else {
    const auto one = [&](const Vec& v, const Vec& bias, const oracle::Coded& coded) {
      return Values{golden::from_out_in({experts, inter, hidden, in_out},
                                        values_of(v, coded, bound.gate_up_scheme)),
                    bias, coded.scales, coded.zeros};
    };
    if (layout_.gate_layout != MOEC_GATE_NONE)
      set_.gate =
          matrix(one(w.gate, w.gate_bias, codes.gate), inter, hidden, in_out, as_output, &gate_);
    set_.up = matrix(one(w.up, w.up_bias, codes.up), inter, hidden, in_out, as_output, &up_);
  }
  const bool down_in_out = layout_.down_orientation == MOEC_IN_OUT;
  const Values down = {golden::from_out_in({experts, hidden, inter, down_in_out},
                                           values_of(w.down, codes.down, bound.down_scheme)),
                       w.down_bias, codes.down.scales, codes.down.zeros};
  set_.down = matrix(down, hidden, inter, down_in_out, as_output, &down_);
  if (as_output) return;
  put_codes(bound.set.gate_up, &set_.gate_up);
  put_codes(bound.set.gate, &set_.gate);
  put_codes(bound.set.up, &set_.up);
  put_codes(bound.set.down, &set_.down);
}

moec_tensor WeightSet::stack(const Vec& values, const std::vector<int64_t>& shape, bool as_output) {
  if (values.empty()) return {};
  if (as_output && !before_) return tensors_.output(layout_.dtype, shape);
  const Vec same(as_output ? values.size() : 0, as_output ? *before_ : 0);
  return tensors_.input(as_output ? same : values, layout_.dtype, shape);
}

const moec_tensor* WeightSet::pointers(const moec_tensor& whole) {
  std::vector<moec_tensor> parts;
  for (int e = 0; e < experts_; ++e) parts.push_back(slice(whole, e));
  pointer_arrays_.push_back(std::move(parts));
  return pointer_arrays_.back().data();
}

const moec_quant* WeightSet::quant(const Values& values, int rows, bool in_out) {
  const std::vector<int64_t> shape =
      in_out ? std::vector<int64_t>{experts_, 1, rows} : std::vector<int64_t>{experts_, rows, 1};
  moec_quant& q = quants_.emplace_back();
  moec_struct_init(&q, sizeof(q));
  q.scales = tensors_.input(values.scales, layout_.scale_dtype, shape);
  q.zeros = tensors_.input(values.zeros, MOEC_I8, shape);
  if (!layout_.per_expert) return &q;
  q.per_expert_scales = pointers(q.scales);
  if (q.zeros.data) q.per_expert_zeros = pointers(q.zeros);
  q.scales = q.zeros = {};
  return &q;
}

moec_matrix WeightSet::matrix(const Values& values, int rows, int inputs, bool in_out,
                              bool as_output, Stored* stored) {
  const std::vector<int64_t> shape = in_out ? std::vector<int64_t>{experts_, inputs, rows}
                                            : std::vector<int64_t>{experts_, rows, inputs};
  const bool coded = !values.scales.empty();
  moec_matrix m{};
  if (!coded)
    stored->data = stack(values.data, shape, as_output);
  else if (!as_output) {
    stored->data = tensors_.input(values.data, MOEC_I8, shape);
    m.quant = quant(values, rows, in_out);
  }
  stored->bias = stack(values.bias, {experts_, rows}, as_output);
  if (layout_.per_expert && stored->data.data)
    m.per_expert = pointers(stored->data);
  else
    m.data = stored->data;
  const bool own_bias = (layout_.per_expert || layout_.per_expert_bias) && stored->bias.data;
  if (own_bias)
    m.per_expert_bias = pointers(stored->bias);
  else
    m.bias = stored->bias;
  if (m.per_expert || m.per_expert_bias) m.count = experts_;
  return m;
}

moec_weights_desc WeightSet::desc(bool frozen) const {
  moec_weights_desc d;
  moec_struct_init(&d, sizeof(d));
  d.flags = frozen ? MOEC_WEIGHTS_FROZEN : 0;
  d.num_experts = experts_;
  d.gate_layout = layout_.gate_layout;
  d.hidden = hidden_;
  d.inter = inter_;
  d.gate_up_orientation = layout_.gate_up_orientation;
  d.down_orientation = layout_.down_orientation;
  d.dtype = layout_.dtype;
  d.gate_up_scheme = gate_up_scheme_;
  d.down_scheme = down_scheme_;
  return d;
}

oracle::MlpWeights WeightSet::read() const {
  oracle::MlpWeights w;
  const bool in_out = layout_.gate_up_orientation == MOEC_IN_OUT;
  if (is_one_matrix(layout_.gate_layout)) {
    const auto kind = static_cast<GateLayout>(layout_.gate_layout);
    if (gate_up_.data.data)
      golden::split_gate_up({experts_, 2 * inter_, hidden_, in_out}, kind,
                            tensors_.read(gate_up_.data), &w.gate, &w.up);
    if (has_gate_up_bias_)
      golden::split_gate_up({experts_, 2 * inter_, 1, false}, kind, tensors_.read(gate_up_.bias),
                            &w.gate_bias, &w.up_bias);
  } else {
    const auto canonical = [&](const moec_tensor& t) {
      return t.data ? golden::to_out_in({experts_, inter_, hidden_, in_out}, tensors_.read(t))
                    : Vec{};
    };
    w.gate = canonical(gate_.data);
    w.up = canonical(up_.data);
    w.gate_bias = tensors_.read(gate_.bias);
    w.up_bias = tensors_.read(up_.bias);
  }
  const bool down_in_out = layout_.down_orientation == MOEC_IN_OUT;
  if (down_.data.data)
    w.down = golden::to_out_in({experts_, hidden_, inter_, down_in_out}, tensors_.read(down_.data));
  w.down_bias = tensors_.read(down_.bias);
  return w;
}

std::vector<uint8_t> WeightSet::bytes() const {
  std::vector<uint8_t> all;
  for (const Stored* s : {&gate_up_, &gate_, &up_, &down_})
    for (const moec_tensor* t : {&s->data, &s->bias}) {
      const std::vector<uint8_t> one = tensors_.read_bytes(*t);
      all.insert(all.end(), one.begin(), one.end());
    }
  return all;
}

}  // namespace moec::test
