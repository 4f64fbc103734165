# SPDX-License-Identifier: Apache-2.0
"""What a key means that config.json lacks: the default of the model type's reference config class,
where it is not the one that its Key in the families table has. Keys that are null there are left
out."""

from __future__ import annotations

from typing import Any


def _sizes(experts: int, top_k: int, **more: Any) -> dict[str, Any]:
    return {"num_experts": experts, "num_experts_per_tok": top_k} | more


def _local(experts: int, top_k: int, **more: Any) -> dict[str, Any]:
    return {"num_local_experts": experts, "num_experts_per_tok": top_k} | more


def _routed(experts: int, top_k: int, **more: Any) -> dict[str, Any]:
    sizes = {"n_routed_experts": experts, "num_experts_per_tok": top_k, "n_shared_experts": 1}
    return sizes | {"norm_topk_prob": True} | more


_BY_TYPES: dict[tuple[str, ...], dict[str, Any]] = {
    ("mixtral", "minimax"): _local(8, 2),
    ("qwen2_moe",): _sizes(60, 4, norm_topk_prob=False),
    ("qwen3_moe",): _sizes(128, 8, norm_topk_prob=False),
    ("qwen3_next",): _sizes(512, 10, norm_topk_prob=True),
    ("qwen3_5_moe", "qwen3_5_moe_text"): _sizes(256, 8),
    ("qwen3_vl_moe", "qwen3_vl_moe_text"): _sizes(60, 4),
    ("olmoe",): _sizes(64, 8, norm_topk_prob=False),
    ("flex_olmo",): _sizes(7, 5, norm_topk_prob=False),
    ("jamba",): _sizes(16, 2),
    ("cohere2_moe",): _sizes(8, 2, norm_topk_prob=True),
    ("hunyuan_v1_moe",): {"num_experts": 1, "moe_topk": 1},
    ("phimoe",): _local(16, 2),
    ("dbrx",): {"moe_num_experts": 4, "moe_top_k": 1},
    ("granitemoe", "granitemoeshared", "granitemoehybrid", "jetmoe"): _local(8, 2),
    ("gpt_oss",): _local(128, 4),
    ("llama4", "llama4_text"): _local(16, 1),
    ("lfm2_moe",): _sizes(32, 4, norm_topk_prob=True),
    ("longcat_flash",): {"n_routed_experts": 512, "moe_topk": 12, "zero_expert_num": 256,
                         "routed_scaling_factor": 6.0},
    ("minimax_m2",): _local(256, 8),
    ("minimax_m3_vl", "minimax_m3_vl_text"): _local(128, 4, routed_scaling_factor=2.0),
    ("ernie4_5_moe",): {"moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2},
    ("deepseek_v2",): {"n_routed_experts": 64, "n_shared_experts": 2},
    ("deepseek_v3", "kimi_k2"): _routed(256, 8, n_group=8, topk_group=4,
                                        routed_scaling_factor=2.5),
    ("dots1",): {"norm_topk_prob": False},
    ("glm4_moe", "glm4v_moe", "glm4v_moe_text", "solar_open"): _routed(128, 8),
    ("glm4_moe_lite",): _routed(64, 4, routed_scaling_factor=1.8),
    ("glm_moe_dsa",): _routed(256, 8, routed_scaling_factor=2.5),
    ("exaone_moe",): _sizes(64, 8, norm_topk_prob=True, num_shared_experts=1,
                            routed_scaling_factor=2.5),
    ("mimo_v2", "mimo_v2_flash"): _routed(256, 8, n_shared_experts=0),
    ("kimi_linear",): {"num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1,
                       "moe_renormalize": True, "routed_scaling_factor": 2.446},
    ("nemotron_h",): _routed(8, 2),
    ("afmoe",): _sizes(64, 6, num_shared_experts=2),
    ("deepseek_v4",): _routed(256, 6, routed_scaling_factor=1.5, swiglu_limit=10.0),
    ("laguna",): _sizes(256, 8),
    ("step3p5",): {"n_routed_experts": 288, "num_experts_per_tok": 8},
}

DEFAULTS: dict[str, dict[str, Any]] = {
    model_type: row for model_types, row in _BY_TYPES.items() for model_type in model_types
}
