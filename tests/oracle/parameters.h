// SPDX-License-Identifier: Apache-2.0
// Every differentiable input of a layer beside its gradient, by name.
#pragma once

#include "moe_oracle.h"

namespace moec::oracle {

// visit(name, value, gradient, columns) for each input that is present; InputsT and GradientsT may
// be const. columns: the width of a row in comparisons.
template <typename InputsT, typename GradientsT, typename Visit>
void for_each_parameter(const Config& config, InputsT& in, GradientsT& grads, Visit visit) {
  const auto hidden = static_cast<size_t>(config.experts.hidden);
  const auto each = [&](const char* name, auto& value, auto& gradient, size_t columns) {
    if (!value.empty()) visit(name, value, gradient, columns);
  };
  const auto mlp = [&](const char* const* names, auto& value, auto& gradient, size_t inter) {
    each(names[0], value.gate, gradient.gate, hidden);
    each(names[1], value.up, gradient.up, hidden);
    each(names[2], value.down, gradient.down, inter);
    each(names[3], value.gate_bias, gradient.gate_bias, inter);
    each(names[4], value.up_bias, gradient.up_bias, inter);
    each(names[5], value.down_bias, gradient.down_bias, hidden);
  };
  static constexpr const char* kExperts[] = {"experts.gate",    "experts.up",
                                             "experts.down",    "experts.gate_bias",
                                             "experts.up_bias", "experts.down_bias"};
  static constexpr const char* kShared[] = {"shared.gate",    "shared.up",
                                            "shared.down",    "shared.gate_bias",
                                            "shared.up_bias", "shared.down_bias"};
  each("x", in.x, grads.x, hidden);
  each("router_x", in.router_x, grads.router_x, hidden);
  each("gate_weight", in.gate_weight, grads.gate_weight, hidden);
  each("gate_bias", in.gate_bias, grads.gate_bias, in.gate_bias.size());
  each("input_scale", in.input_scale, grads.input_scale, hidden);
  each("per_expert_scale", in.per_expert_scale, grads.per_expert_scale, in.per_expert_scale.size());
  mlp(kExperts, in.experts, grads.experts, static_cast<size_t>(config.experts.inter));
  mlp(kShared, in.shared, grads.shared, static_cast<size_t>(config.experts.shared_inter));
  each("shared_gate", in.shared_gate, grads.shared_gate, hidden);
  each("shared_gate_bias", in.shared_gate_bias, grads.shared_gate_bias, in.shared_gate_bias.size());
  each("output_bias", in.output_bias, grads.output_bias, hidden);
  each("residual", in.residual, grads.residual, hidden);
}

}  // namespace moec::oracle
