// SPDX-License-Identifier: Apache-2.0
// Generated from moec.h by generate.py; do not edit.
// Where each named array of the Python side goes in the structs of moec.h.
#pragma once

#include "field.h"

namespace moec::xla {

inline constexpr Field<moec_layer_args> kLayerInputs[] = {
    {"x", &moec_layer_args::x},
    {"router_x", &moec_layer_args::router_x},
    {"gate_weight", &moec_layer_args::gate_weight},
    {"gate_bias", &moec_layer_args::gate_bias},
    {"input_scale", &moec_layer_args::input_scale},
    {"select_bias", &moec_layer_args::select_bias},
    {"per_expert_scale", &moec_layer_args::per_expert_scale},
    {"token_mask", &moec_layer_args::token_mask},
    {"table", &moec_layer_args::table},
    {"token_ids", &moec_layer_args::token_ids},
    {"given_ids", &moec_layer_args::given_ids},
    {"shared_gate", &moec_layer_args::shared_gate},
    {"shared_gate_bias", &moec_layer_args::shared_gate_bias},
    {"output_bias", &moec_layer_args::output_bias},
    {"residual", &moec_layer_args::residual},
    {"adapter_ids", &moec_layer_args::adapter_ids},
};
inline constexpr Field<moec_layer_args> kLayerOutputs[] = {
    {"y", &moec_layer_args::y},
    {"logits", &moec_layer_args::logits},
    {"expert_ids", &moec_layer_args::expert_ids},
    {"routing_weights", &moec_layer_args::routing_weights},
    {"counts", &moec_layer_args::counts},
};
inline constexpr Field<moec_layer_grad_args> kLayerGradInputs[] = {
    {"d_y", &moec_layer_grad_args::d_y},
    {"d_logits_in", &moec_layer_grad_args::d_logits_in},
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
    {"residual", &moec_layer_grad_args::d_residual},
    {"routing_weights", &moec_layer_grad_args::d_routing_weights},
};
inline constexpr Field<moec_experts_args> kExpertsInputs[] = {
    {"x", &moec_experts_args::x},
    {"shared_gate", &moec_experts_args::shared_gate},
    {"shared_gate_bias", &moec_experts_args::shared_gate_bias},
    {"output_bias", &moec_experts_args::output_bias},
    {"residual", &moec_experts_args::residual},
    {"adapter_ids", &moec_experts_args::adapter_ids},
};
inline constexpr Field<moec_experts_args> kExpertsOutputs[] = {
    {"y", &moec_experts_args::y},
};
inline constexpr Field<moec_experts_grad_args> kExpertsGradInputs[] = {
    {"x", &moec_experts_grad_args::x},
    {"shared_gate", &moec_experts_grad_args::shared_gate},
    {"shared_gate_bias", &moec_experts_grad_args::shared_gate_bias},
    {"d_y", &moec_experts_grad_args::d_y},
    {"adapter_ids", &moec_experts_grad_args::adapter_ids},
};
inline constexpr Field<moec_experts_grad_args> kExpertsGradients[] = {
    {"x", &moec_experts_grad_args::d_x},
    {"routing_weights", &moec_experts_grad_args::d_routing_weights},
    {"shared_gate", &moec_experts_grad_args::d_shared_gate},
    {"shared_gate_bias", &moec_experts_grad_args::d_shared_gate_bias},
    {"output_bias", &moec_experts_grad_args::d_output_bias},
    {"residual", &moec_experts_grad_args::d_residual},
};

inline constexpr MatrixField kMatrices[] = {
    {"gate_up", "gate_up", &moec_weight_set::gate_up, &moec_matrix::data},
    {"gate", "gate", &moec_weight_set::gate, &moec_matrix::data},
    {"up", "up", &moec_weight_set::up, &moec_matrix::data},
    {"down", "down", &moec_weight_set::down, &moec_matrix::data},
    {"gate_up_bias", "gate_up_bias", &moec_weight_set::gate_up, &moec_matrix::bias},
    {"gate_bias", "expert_gate_bias", &moec_weight_set::gate, &moec_matrix::bias},
    {"up_bias", "up_bias", &moec_weight_set::up, &moec_matrix::bias},
    {"down_bias", "down_bias", &moec_weight_set::down, &moec_matrix::bias},
};

}  // namespace moec::xla
