// SPDX-License-Identifier: Apache-2.0
// One small layer with all its handles, memory and argument structs: what most tests of the C
// boundary start from and then spoil in one place.
#pragma once

#include <moec/moec.h>

#include <cstring>
#include <initializer_list>
#include <vector>

#include "support/handles.h"
#include "support/random.h"

namespace moec::test {

inline moec_tensor tensor_of(void* data, moec_dtype dtype, std::initializer_list<int64_t> shape) {
  moec_tensor out = {};
  check(moec_tensor_make(&out, data, dtype, MOEC_CPU, 0, int32_t(shape.size()), shape.begin()));
  return out;
}

struct Problem {
  static constexpr int64_t kTokens = 5, kHidden = 16, kInter = 24, kExperts = 4, kTopK = 2;
  static constexpr uint8_t kFill = 0xa5;  // of outputs, so that a stray write shows

  explicit Problem(const moec_context* shared_context = nullptr, uint32_t save = MOEC_SAVE_ALL,
                   int64_t num_tokens = kTokens)
      : T(num_tokens) {
    if (!shared_context) own_context = make<Context>(moec_context_create, nullptr_desc());
    context = shared_context ? shared_context : own_context.get();
    Random random(7);
    for (auto* values : {&x, &gate_weight, &gate_up, &down, &d_y})
      for (float& value : *values) value = float(0.3 * random.normal());
    router_desc = sized<moec_router_desc>();
    router_desc.num_experts = kExperts;
    router_desc.top_k = kTopK;
    experts_desc = sized<moec_experts_desc>();
    experts_desc.hidden = kHidden;
    experts_desc.inter = kInter;
    experts_desc.num_experts = kExperts;
    experts_desc.top_k = kTopK;
    experts_desc.dtype = MOEC_F32;
    experts_desc.save = save;
    plan_desc = sized<moec_plan_desc>();
    plan_desc.max_tokens = T + 3;
    plan_desc.num_experts = kExperts;
    plan_desc.top_k = kTopK;
    weights_desc = sized<moec_weights_desc>();
    weights_desc.flags = MOEC_WEIGHTS_FROZEN;
    weights_desc.num_experts = kExperts;
    weights_desc.gate_layout = MOEC_GATE_THEN_UP;
    weights_desc.hidden = kHidden;
    weights_desc.inter = kInter;
    weights_desc.dtype = MOEC_F32;
    router = make<Router>(moec_router_create, context, &router_desc);
    experts = make<Experts>(moec_experts_create, context, &experts_desc);
    plan = make<PlanHandle>(moec_plan_create, context, &plan_desc, nullptr_buffer());
    weights = make<Weights>(moec_weights_create, context, &weights_desc);
    const moec_weight_set set = weight_set(gate_up, down);
    check(moec_weights_bind(weights.get(), &set));
    const moec_layer_desc desc = layer_desc();
    layer = make<LayerHandle>(moec_layer_create, context, &desc);
    layer_sizes = sized<moec_experts_sizes>();
    check(moec_layer_query(layer.get(), &layer_sizes));
    experts_sizes = sized<moec_experts_sizes>();
    check(moec_experts_query(experts.get(), &experts_sizes));
    saved.resize(bytes(layer_sizes.saved));
    experts_saved.resize(bytes(experts_sizes.saved));
  }

  uint64_t bytes(const moec_size& size) const { return size.base + uint64_t(T) * size.per_token; }

  moec_layer_desc layer_desc() const {
    auto desc = sized<moec_layer_desc>();
    desc.router = &router_desc;
    desc.experts = &experts_desc;
    return desc;
  }
  moec_weight_set weight_set(std::vector<float>& up, std::vector<float>& back) const {
    auto set = sized<moec_weight_set>();
    set.gate_up.data = tensor_of(up.data(), MOEC_F32, {kExperts, 2 * kInter, kHidden});
    set.down.data = tensor_of(back.data(), MOEC_F32, {kExperts, kHidden, kInter});
    return set;
  }
  moec_tensor rows(std::vector<float>& values) const {
    return tensor_of(values.data(), MOEC_F32, {T, kHidden});
  }
  moec_buffer buffer(std::vector<uint8_t>& memory) const { return {memory.data(), memory.size()}; }

  void build_plan() {
    const moec_tensor given = tensor_of(given_ids.data(), MOEC_I32, {T, kTopK});
    check(moec_plan_from_topk(plan.get(), &given, nullptr, nullptr));
  }

  moec_layer_args forward_args() {
    auto args = sized<moec_layer_args>();
    args.weights = weights.get();
    args.x = rows(x);
    args.gate_weight = tensor_of(gate_weight.data(), MOEC_F32, {kExperts, kHidden});
    args.y = rows(y);
    args.logits = tensor_of(logits.data(), MOEC_F32, {T, kExperts});
    args.expert_ids = tensor_of(ids.data(), MOEC_I32, {T, kTopK});
    args.routing_weights = tensor_of(routing.data(), MOEC_F32, {T, kTopK});
    args.saved = buffer(saved);
    return args;
  }
  moec_layer_grad_args backward_args(const moec_layer_args* forward) {
    gradients = weight_set(d_gate_up, d_down);
    auto args = sized<moec_layer_grad_args>();
    args.forward = forward;
    args.d_y = rows(d_y);
    args.d_x = rows(d_x);
    args.d_gate_weight = tensor_of(d_gate_weight.data(), MOEC_F32, {kExperts, kHidden});
    args.d_expert_weights = &gradients;
    return args;
  }
  moec_experts_args experts_args() {
    auto args = sized<moec_experts_args>();
    args.plan = plan.get();
    args.weights = weights.get();
    args.x = rows(x);
    args.y = rows(y);
    args.saved = buffer(experts_saved);
    return args;
  }
  moec_experts_grad_args experts_grad_args() {
    gradients = weight_set(d_gate_up, d_down);
    auto args = sized<moec_experts_grad_args>();
    args.plan = plan.get();
    args.weights = weights.get();
    args.x = rows(x);
    args.d_y = rows(d_y);
    args.saved = buffer(experts_saved);
    args.d_x = rows(d_x);
    args.d_expert_weights = &gradients;
    return args;
  }

  // Outputs filled with a pattern, and whether they still are.
  void fill_outputs() {
    for (auto* values : outputs()) std::memset(values->data(), kFill, values->size() * 4);
    std::memset(ids.data(), kFill, ids.size() * 4);
    std::memset(saved.data(), kFill, saved.size());
  }
  bool outputs_untouched() {
    const auto is_filled = [](const void* data, size_t count) {
      const auto* byte = static_cast<const uint8_t*>(data);
      for (size_t i = 0; i < count; ++i)
        if (byte[i] != kFill) return false;
      return true;
    };
    for (auto* values : outputs())
      if (!is_filled(values->data(), values->size() * 4)) return false;
    return is_filled(ids.data(), ids.size() * 4) && is_filled(saved.data(), saved.size());
  }

  int64_t T;
  Context own_context;
  const moec_context* context;
  moec_router_desc router_desc;
  moec_experts_desc experts_desc;
  moec_plan_desc plan_desc;
  moec_weights_desc weights_desc;
  std::vector<float> x = floats(T * kHidden), gate_weight = floats(kExperts * kHidden),
                     gate_up = floats(kExperts * 2 * kInter * kHidden),
                     down = floats(kExperts * kInter * kHidden), d_y = floats(T * kHidden);
  std::vector<int32_t> given_ids = cycle(T * kTopK);
  std::vector<float> y = floats(T * kHidden), logits = floats(T * kExperts),
                     routing = floats(T * kTopK), d_x = floats(T * kHidden),
                     d_gate_weight = floats(kExperts * kHidden),
                     d_gate_up = floats(int64_t(gate_up.size())),
                     d_down = floats(int64_t(down.size()));
  std::vector<int32_t> ids = cycle(T * kTopK);
  std::vector<uint8_t> saved, experts_saved;
  moec_weight_set gradients;
  moec_experts_sizes layer_sizes, experts_sizes;
  Router router;
  Experts experts;
  PlanHandle plan;
  Weights weights;
  LayerHandle layer;

 private:
  static std::vector<float> floats(int64_t count) { return std::vector<float>(size_t(count)); }
  static std::vector<int32_t> cycle(int64_t count) {
    std::vector<int32_t> ids(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) ids[size_t(i)] = int32_t((i + i / kTopK) % kExperts);
    return ids;
  }
  static const moec_context_desc* nullptr_desc() { return nullptr; }
  static const moec_buffer* nullptr_buffer() { return nullptr; }
  std::vector<std::vector<float>*> outputs() {
    return {&y, &logits, &routing, &d_x, &d_gate_weight, &d_gate_up, &d_down};
  }
};

inline moec_error_info error_info() {
  auto info = sized<moec_error_info>();
  check(moec_last_error(&info));
  return info;
}

}  // namespace moec::test
