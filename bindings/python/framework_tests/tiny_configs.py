# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of the families that transformers has, with MoE blocks in every layer."""

from __future__ import annotations

from typing import Any

import torch
import transformers

_COMMON: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
_ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0, "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "num_key_value_heads": 4,
}
_QWEN: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
_LOCAL: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}
_FULL: dict[str, Any] = {"layer_types": ["full_attention"] * 2}
_SPARSE: dict[str, Any] = {"mlp_layer_types": ["sparse"] * 2}
_SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 40}
_VISION: dict[str, Any] = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
                           "out_hidden_size": 32}
_QWEN_VISION = _VISION | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2],
                              "rope_theta": 1e4}}
_LLAMA4 = {
    "num_local_experts": 8, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
    "intermediate_size_mlp": 40, "attention_chunk_size": 64, "use_qk_norm": False,
    "layer_types": ["chunked_attention", "full_attention"],
}
_LLAMA4_VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32,
    "projector_output_dim": 32,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", _LOCAL),
    "minimax": ("MiniMax", _LOCAL | _FULL),
    "qwen2_moe": ("Qwen2Moe", _QWEN | _SHARED | {"decoder_sparse_step": 1}),
    "qwen3_moe": ("Qwen3Moe", _QWEN | {"norm_topk_prob": True}),
    "qwen3_next": ("Qwen3Next", _QWEN | _SHARED | _FULL),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", _QWEN | _SHARED | _FULL),
    "olmoe": ("Olmoe", _QWEN | {"intermediate_size": 24}),
    "flex_olmo": ("FlexOlmo", _QWEN | {"intermediate_size": 24}),
    "jamba": ("Jamba", {
        "num_experts": 8, "num_experts_per_tok": 2, "attn_layer_period": 1,
        "attn_layer_offset": 0, "expert_layer_period": 1, "expert_layer_offset": 0,
        "use_mamba_kernels": False}),
    "cohere2_moe": ("Cohere2Moe", _QWEN),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"num_experts": 8, "moe_topk": 3, "num_shared_expert": 1}),
    "phimoe": ("Phimoe", _LOCAL),
    "gemma4_text": ("Gemma4Text", _FULL | {
        "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24,
        "enable_moe_block": True, "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 16}),
    "granitemoe": ("GraniteMoe", _LOCAL),
    "granitemoeshared": ("GraniteMoeShared", _LOCAL | {"shared_intermediate_size": 40}),
    "granitemoehybrid": ("GraniteMoeHybrid", _LOCAL | {
        "shared_intermediate_size": 40, "layer_types": ["attention"] * 2, "mamba_n_heads": 4,
        "mamba_d_head": 16}),
    "jetmoe": ("JetMoe", _LOCAL | {"kv_channels": 8}),
    "gpt_oss": ("GptOss", _LOCAL | {
        "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}),
    "llama4_text": ("Llama4Text", _LLAMA4),
    "lfm2_moe": ("Lfm2Moe", _QWEN | _FULL | {"num_dense_layers": 0}),
    "longcat_flash": ("LongcatFlash", _LATENT | {
        "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "n_routed_experts": 8,
        "zero_expert_num": 2, "moe_topk": 3, "num_layers": 1}),
    "minimax_m2": ("MiniMaxM2", _LOCAL),
    "minimax_m3_vl_text": ("MiniMaxM3VLText", _LOCAL | _SPARSE | {
        "n_shared_experts": 1, "shared_intermediate_size": 24}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {
        "moe_intermediate_size": 24, "moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0, "moe_layer_end_index": -1, "moe_layer_interval": 1}),
    "deepseek_v2": ("DeepseekV2", _ROUTED | _LATENT | {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", _ROUTED | _LATENT),
    "dots1": ("Dots1", _ROUTED | _FULL),
    "glm4_moe": ("Glm4Moe", _ROUTED),
    "glm4_moe_lite": ("Glm4MoeLite", _ROUTED | _LATENT | _SPARSE),
    "glm_moe_dsa": ("GlmMoeDsa", _ROUTED | _LATENT | _SPARSE | {
        "index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}),
    "solar_open": ("SolarOpen", _ROUTED),
    "exaone_moe": ("ExaoneMoe", _QWEN | _FULL | {
        "num_shared_experts": 1, "first_k_dense_replace": 0, "is_moe_layer": [True] * 2}),
    "mimo_v2_flash": ("MiMoV2Flash", _ROUTED | _FULL | _SPARSE | {
        "n_shared_experts": None, "v_head_dim": 8}),
    "kimi_linear": ("KimiLinear", _LATENT | _QWEN | {
        "num_experts_per_token": 3, "first_k_dense_replace": 0, "num_shared_experts": 1,
        "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1}),
    "nemotron_h": ("NemotronH", _ROUTED | {
        "layers_block_type": ["moe", "attention"], "moe_shared_expert_intermediate_size": 40}),
    "afmoe": ("Afmoe", _QWEN | _FULL | {"num_dense_layers": 0, "num_shared_experts": 1}),
    "deepseek_v4": ("DeepseekV4", {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "mlp_layer_types": ["moe"] * 2, "layer_types": ["sliding_attention"] * 2}),
    "laguna": ("Laguna", _QWEN | _SHARED | _FULL | _SPARSE | {
        "moe_routed_scaling_factor": 2.5, "moe_router_logit_softcapping": 3.0,
        "num_attention_heads_per_layer": [4, 4]}),
    "llama4": ("Llama4", {"text_config": _COMMON | _LLAMA4, "vision_config": _LLAMA4_VISION}),
    "qwen3_vl_moe": ("Qwen3VLMoe", {
        "text_config": _COMMON | _QWEN | _MROPE, "vision_config": _QWEN_VISION}),
    "qwen3_5_moe": ("Qwen3_5Moe", {
        "text_config": _COMMON | _QWEN | _SHARED | _FULL, "vision_config": _QWEN_VISION}),
    "dbrx": ("Dbrx", {
        "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 3,
                       "hidden_size": 32}}),
    "step3p5": ("Step3p7", {  # the type of its language part
        "text_config": _COMMON | _FULL | _SPARSE | {
            "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "share_expert_dim": 40, "swiglu_limits": [0.5, 0.0],
            "swiglu_limits_shared": [0.4, 0.0], "moe_router_scaling_factor": 1.5,
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                          "image_size": 28, "patch_size": 14, "intermediate_size": 32}}),
    "glm4v_moe": ("Glm4vMoe", {"text_config": _COMMON | _ROUTED, "vision_config": _VISION}),
}


def build(family: str) -> Any:
    """A model whose every parameter and buffer is drawn with deviation 0.2."""
    name, own = CONFIGS[family]
    nested = "text_config" in own
    config = getattr(transformers, f"{name}Config")(**(own if nested else _COMMON | own))
    auto = (transformers.AutoModelForImageTextToText if nested
            else transformers.AutoModelForCausalLM)
    model = auto.from_config(config, attn_implementation="eager", experts_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and "inv_freq" not in name:
                tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
    return model.eval()
