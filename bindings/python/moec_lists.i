// SPDX-License-Identifier: Apache-2.0
// Generated from moec.h by generate.py; do not edit.
RETURNED_HANDLE(moec_context)
RETURNED_HANDLE(moec_router)
RETURNED_HANDLE(moec_plan)
RETURNED_HANDLE(moec_weights)
RETURNED_HANDLE(moec_adapters)
RETURNED_HANDLE(moec_experts)
RETURNED_HANDLE(moec_layer)
RETURNED_HANDLE(moec_comm)
RETURNED_HANDLE(moec_ep)
SIZED(moec_quant)
SIZED(moec_error_info)
SIZED(moec_device_info)
SIZED(moec_context_desc)
SIZED(moec_stats)
SIZED(moec_router_desc)
SIZED(moec_gate_args)
SIZED(moec_gate_grad_args)
SIZED(moec_route_args)
SIZED(moec_route_grad_args)
SIZED(moec_loss_args)
SIZED(moec_plan_desc)
SIZED(moec_permute_args)
SIZED(moec_unpermute_args)
SIZED(moec_permute_grad_args)
SIZED(moec_unpermute_grad_args)
SIZED(moec_weights_desc)
SIZED(moec_weight_set)
SIZED(moec_weights_info)
SIZED(moec_quantise_desc)
SIZED(moec_quantise_info)
SIZED(moec_quantise_args)
SIZED(moec_adapters_desc)
SIZED(moec_experts_desc)
SIZED(moec_experts_args)
SIZED(moec_experts_grad_args)
SIZED(moec_experts_sizes)
SIZED(moec_layer_desc)
SIZED(moec_layer_args)
SIZED(moec_layer_grad_args)
SIZED(moec_comm_callbacks)
SIZED(moec_comm_desc)
SIZED(moec_ep_desc)
SIZED(moec_ep_info)
SIZED(moec_ep_args)
SIZED(moec_ep_state)
%thread moec_backend_load;
%thread moec_device_count;
%thread moec_backend_describe;
%thread moec_device_query;
%thread moec_context_create;
%thread moec_context_free;
%thread moec_context_reserve;
%thread moec_context_trim;
%thread moec_context_poll;
%thread moec_context_sync;
%thread moec_buffer_alloc;
%thread moec_buffer_free;
%thread moec_tensor_copy;
%thread moec_tensor_zero;
%thread moec_router_create;
%thread moec_router_free;
%thread moec_gate_forward;
%thread moec_gate_backward;
%thread moec_route_forward;
%thread moec_route_backward;
%thread moec_router_bias_update;
%thread moec_loss_forward;
%thread moec_loss_backward;
%thread moec_plan_create;
%thread moec_plan_free;
%thread moec_plan_from_topk;
%thread moec_plan_from_logits;
%thread moec_plan_from_map;
%thread moec_plan_from_rule;
%thread moec_plan_from_scores;
%thread moec_plan_export;
%thread moec_plan_totals_sync;
%thread moec_plan_save_sync;
%thread moec_plan_restore_sync;
%thread moec_permute;
%thread moec_unpermute;
%thread moec_permute_backward;
%thread moec_unpermute_backward;
%thread moec_weights_create;
%thread moec_weights_free;
%thread moec_weights_pack;
%thread moec_weights_refresh;
%thread moec_weights_dequantise;
%thread moec_weights_unpack;
%thread moec_weights_save_sync;
%thread moec_weights_map_sync;
%thread moec_quantise;
%thread moec_adapters_create;
%thread moec_adapters_free;
%thread moec_adapters_merge;
%thread moec_adapters_unmerge;
%thread moec_adapters_merge_copy;
%thread moec_experts_create;
%thread moec_experts_free;
%thread moec_experts_forward;
%thread moec_experts_backward;
%thread moec_layer_create;
%thread moec_layer_free;
%thread moec_layer_forward;
%thread moec_layer_backward;
%thread moec_comm_create;
%thread moec_comm_free;
%thread moec_comm_abort;
%thread moec_comm_sum;
%thread moec_ep_create;
%thread moec_ep_free;
%thread moec_ep_dispatch;
%thread moec_ep_combine;
%thread moec_ep_poll;
