// SPDX-License-Identifier: Apache-2.0
// Where each named array of the Python side goes in the structs of moec.h.
#pragma once

#include <moec/moec.h>

#include <string_view>

namespace moec::xla {

template <class Args>
struct Field {
  const char* name;
  moec_tensor Args::* member;
};

inline constexpr Field<moec_layer_args> kLayerInputs[] = {
    {"x", &moec_layer_args::x},
    {"router_x", &moec_layer_args::router_x},
    {"gate_weight", &moec_layer_args::gate_weight},
    {"gate_bias", &moec_layer_args::gate_bias},
    {"input_scale", &moec_layer_args::input_scale},
    {"per_expert_scale", &moec_layer_args::per_expert_scale},
    {"select_bias", &moec_layer_args::select_bias},
    {"token_mask", &moec_layer_args::token_mask},
    {"table", &moec_layer_args::table},
    {"token_ids", &moec_layer_args::token_ids},
    {"given_ids", &moec_layer_args::given_ids},
    {"shared_gate", &moec_layer_args::shared_gate},
    {"shared_gate_bias", &moec_layer_args::shared_gate_bias},
    {"output_bias", &moec_layer_args::output_bias},
};
inline constexpr Field<moec_layer_args> kLayerOutputs[] = {
    {"y", &moec_layer_args::y},
    {"logits", &moec_layer_args::logits},
    {"expert_ids", &moec_layer_args::expert_ids},
    {"routing_weights", &moec_layer_args::routing_weights},
};
inline constexpr Field<moec_layer_grad_args> kLayerGradients[] = {
    {"x", &moec_layer_grad_args::d_x},
    {"router_x", &moec_layer_grad_args::d_router_x},
    {"gate_weight", &moec_layer_grad_args::d_gate_weight},
    {"gate_bias", &moec_layer_grad_args::d_gate_bias},
    {"input_scale", &moec_layer_grad_args::d_input_scale},
    {"per_expert_scale", &moec_layer_grad_args::d_per_expert_scale},
    {"shared_gate", &moec_layer_grad_args::d_shared_gate},
    {"shared_gate_bias", &moec_layer_grad_args::d_shared_gate_bias},
    {"output_bias", &moec_layer_grad_args::d_output_bias},
};
inline constexpr Field<moec_experts_args> kExpertsInputs[] = {
    {"x", &moec_experts_args::x},
    {"shared_gate", &moec_experts_args::shared_gate},
    {"shared_gate_bias", &moec_experts_args::shared_gate_bias},
    {"output_bias", &moec_experts_args::output_bias},
};
inline constexpr Field<moec_experts_args> kExpertsOutputs[] = {{"y", &moec_experts_args::y}};
inline constexpr Field<moec_experts_grad_args> kExpertsGradInputs[] = {
    {"x", &moec_experts_grad_args::x},
    {"shared_gate", &moec_experts_grad_args::shared_gate},
    {"shared_gate_bias", &moec_experts_grad_args::shared_gate_bias},
};
inline constexpr Field<moec_experts_grad_args> kExpertsGradients[] = {
    {"x", &moec_experts_grad_args::d_x},
    {"routing_weights", &moec_experts_grad_args::d_routing_weights},
    {"shared_gate", &moec_experts_grad_args::d_shared_gate},
    {"shared_gate_bias", &moec_experts_grad_args::d_shared_gate_bias},
    {"output_bias", &moec_experts_grad_args::d_output_bias},
};

struct MatrixField {
  const char* name;
  moec_matrix moec_weight_set::* matrix;
  moec_tensor moec_matrix::* part;
};
inline constexpr MatrixField kMatrices[] = {
    {"gate_up", &moec_weight_set::gate_up, &moec_matrix::data},
    {"gate", &moec_weight_set::gate, &moec_matrix::data},
    {"up", &moec_weight_set::up, &moec_matrix::data},
    {"down", &moec_weight_set::down, &moec_matrix::data},
    {"gate_up_bias", &moec_weight_set::gate_up, &moec_matrix::bias},
    {"expert_gate_bias", &moec_weight_set::gate, &moec_matrix::bias},
    {"up_bias", &moec_weight_set::up, &moec_matrix::bias},
    {"down_bias", &moec_weight_set::down, &moec_matrix::bias},
};
inline constexpr std::string_view kSharedPrefix = "shared_expert_";

// Put the tensor called `name` where the table says; false when the table has no such name.
template <class Args, size_t N>
bool put(const Field<Args> (&table)[N], std::string_view name, const moec_tensor& tensor,
         Args& args) {
  for (const auto& field : table) {
    if (name == field.name) {
      args.*field.member = tensor;
      return true;
    }
  }
  return false;
}

// Likewise for a matrix or bias of the routed experts or, with the prefix, of the shared one.
inline bool put(std::string_view name, const moec_tensor& tensor, moec_weight_set& routed,
                moec_weight_set& shared) {
  const bool is_shared = name.substr(0, kSharedPrefix.size()) == kSharedPrefix;
  // Named, since gcc 12 assigns to a copy in `(is_shared ? shared : routed).*matrix = ...`.
  moec_weight_set& set = is_shared ? shared : routed;
  if (is_shared) name.remove_prefix(kSharedPrefix.size());
  if (is_shared && name == "gate_bias") name = "expert_gate_bias";
  for (const auto& field : kMatrices) {
    if (name == field.name) {
      (set.*field.matrix).*field.part = tensor;
      return true;
    }
  }
  return false;
}

}  // namespace moec::xla
