# SPDX-License-Identifier: Apache-2.0
"""The model families, one row each: how config.json becomes a router and experts, and how their
tensors are named and laid out. `moec run`, `synth` and `check` read this table and nothing else.

Tensor names are relative to the layer's MoE block; "../" leads to the layer itself. The first name
and the first layout of a row are those of published checkpoints, later ones those of transformers 5
in memory. A Key stands for a value that config.json gives.
"""

from __future__ import annotations

from typing import Any

from ._enums import (
    ActivationKind,
    GateLayout,
    GroupFill,
    Norm,
    Orientation,
    Precision,
    RouterInput,
    Score,
    Select,
    Shared,
    WeightPosition,
    WeightRule,
)
from .family import Family, Key, Layout


def _split(stem: str, gate: str, up: str, down: str) -> Layout:
    names = {"gate": gate, "up": up, "down": down}
    return Layout({name: f"{stem}{proj}.weight" for name, proj in names.items()})


def _stacked(**options: Any) -> Layout:
    names = {"gate_up": "experts.gate_up_proj", "down": "experts.down_proj"}
    return Layout(names, options.pop("gate_layout", GateLayout.GATE_THEN_UP), **options)


_IN_OUT: dict[str, Any] = {
    "gate_up_orientation": Orientation.IN_OUT,
    "down_orientation": Orientation.IN_OUT,
}
_PROJ = _split("experts.{e}.", "gate_proj", "up_proj", "down_proj")
_W123 = _split("experts.{e}.", "w1", "w3", "w2")
_STACKED = _stacked()
_LINEAR = Layout(
    {"gate_up": "input_linear.weight", "down": "output_linear.weight"}, GateLayout.GATE_THEN_UP
)
_GPT_OSS = Layout(
    _stacked().names
    | {"gate_up_bias": "experts.gate_up_proj_bias", "down_bias": "experts.down_proj_bias"},
    GateLayout.INTERLEAVED,
    **_IN_OUT,
)
_DBRX = Layout(
    {"gate": "experts.mlp.w1", "up": "experts.mlp.v1", "down": "experts.mlp.w2"},
    down_orientation=Orientation.IN_OUT,
    flat=True,
)
_PLAIN = Layout(
    {"up": "experts.{e}.up_proj.weight", "down": "experts.{e}.down_proj.weight"}, GateLayout.NONE
)
_PLAIN_STACKED = Layout({"up": "experts.up_proj", "down": "experts.down_proj"}, GateLayout.NONE)


def _shared(stem: str) -> Layout:
    return _split(f"{stem}.", "gate_proj", "up_proj", "down_proj")


_NORM = {True: Norm.SUM, False: Norm.NONE}
_SCORES = {
    "softmax": Score.SOFTMAX,
    "sigmoid": Score.SIGMOID,
    "sqrtsoftplus": Score.SQRT_SOFTPLUS,
}
_SILU = {
    "kind": Key(
        "hidden_act", "activation_function", default="silu",
        of={
            "silu": ActivationKind.SWIGLU,
            "swish": ActivationKind.SWIGLU,
            "gelu": ActivationKind.GEGLU_ERF,
            "gelu_pytorch_tanh": ActivationKind.GEGLU_TANH,
        },
    )
}
_GPT_OSS_ACT = {
    "kind": ActivationKind.GPTOSS,
    "alpha": Key("swiglu_alpha", default=1.702),
    "limit": Key("swiglu_limit", default=7.0),
}
_DATA = {"logit_precision": Precision.DATA}
_SCALE = Key("routed_scaling_factor", default=1.0)
_GATE = {"gate_weight": ("gate.weight",)}
_BIAS = {"select_bias": ("gate.e_score_correction_bias", "e_score_correction_bias")}
_PER_TOK = {"top_k": "num_experts_per_tok"}
_QWEN = _PER_TOK | {"experts": "num_experts", "inter": "moe_intermediate_size"}
_LOCAL = _PER_TOK | {"experts": "num_local_experts", "inter": "intermediate_size"}
_ROUTED = _PER_TOK | {"experts": "n_routed_experts", "inter": "moe_intermediate_size"}


def _softmax(norm: Any, **more: Any) -> dict[str, Any]:
    return _DATA | {"score": Score.SOFTMAX, "norm": norm} | more


def _norm_key(default: bool = False) -> Key:
    return Key("norm_topk_prob", "route_norm", "moe_renormalize", default=default, of=_NORM)


def _score_key(default: str) -> Key:
    # dots.llm1 names its selection rule where others name the score
    known = _SCORES | {"noaux_tc": Score.SIGMOID}
    return Key("scoring_func", "moe_router_activation_func", default=default, of=known)


def _sigmoid(**more: Any) -> dict[str, Any]:
    """DeepSeek-V3's router: sigmoid, selection bias, groups by the sum of their two best."""
    return {
        "score": _score_key("sigmoid"),
        "selection": Select.GROUP_TOPK,
        "num_groups": Key("n_group", "num_expert_group", default=1),
        "top_groups": Key("topk_group", default=1),
        "group_top_m": 2,
        "norm": _norm_key(),
        "norm_eps": 1e-20,
        "scale": _SCALE,
    } | more


_COUNT = Key("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=0)


def _deepseek(*model_types: str, **more: Any) -> Family:
    """A family that differs from DeepSeek-V3 in nothing but what `more` says."""
    row: dict[str, Any] = {
        "router": _sigmoid(),
        "activation": _SILU,
        "tensors": _GATE | _BIAS,
        "layouts": (_PROJ, _STACKED),
        "shared": Shared.ADD,
        "shared_layouts": (_shared("shared_experts"),),
        "shared_count": _COUNT,
        "sizes": _ROUTED,
    }
    return Family(model_types=model_types, **(row | more))


def _mixtral(*model_types: str, **more: Any) -> Family:
    """Softmax router and gated experts without a shared one."""
    row: dict[str, Any] = {
        "router": _softmax(Norm.SUM),
        "activation": _SILU,
        "tensors": _GATE,
        "layouts": (_PROJ, _STACKED),
        "sizes": _QWEN,
    }
    return Family(model_types=model_types, **(row | more))


_SIGMOID_GATE: dict[str, Any] = {
    "tensors": _GATE | {"shared_gate": ("shared_expert_gate.weight",)},
    "shared": Shared.SIGMOID_GATE,
    "shared_layouts": (_shared("shared_expert"),),
    "sizes": _QWEN | {"shared_inter": "shared_expert_intermediate_size"},
}
_BLOCK = {"block": "block_sparse_moe", "layouts": (_W123, _STACKED), "sizes": _LOCAL}
_M2 = {"score": Score.SIGMOID, "norm": Norm.SUM}
_GRANITE_LAYOUTS = (_LINEAR, _STACKED)
_GRANITE_GATE = {"gate_weight": ("router.layer.weight", "router.weight")}
_SELECTED = _DATA | {"score": Score.IDENTITY, "weight_rule": WeightRule.SOFTMAX_SELECTED}

FAMILIES: tuple[Family, ...] = (
    _mixtral("mixtral", **_BLOCK),
    _mixtral("minimax", "minimax_text_01", **_BLOCK),
    _mixtral("qwen2_moe", router=_softmax(_norm_key()), **_SIGMOID_GATE),
    _mixtral("qwen3_moe", router=_softmax(_norm_key())),
    _mixtral("qwen3_next", router=_softmax(_norm_key()), **_SIGMOID_GATE),
    _mixtral("qwen3_5_moe", "qwen3_5_moe_text",
             **_SIGMOID_GATE | {"layouts": (_STACKED, _PROJ)}),
    _mixtral("qwen3_vl_moe", "qwen3_vl_moe_text", layouts=(_stacked(**_IN_OUT), _STACKED, _PROJ),
             prefix="model.language_model.layers"),
    _mixtral("olmoe", router=_softmax(_norm_key()),
             sizes=_QWEN | {"inter": "intermediate_size"}),
    _mixtral("flex_olmo", router=_softmax(_norm_key()),
             sizes=_QWEN | {"inter": "intermediate_size"}),
    _mixtral("jamba", block="feed_forward", router=_softmax(Norm.NONE),
             tensors={"gate_weight": ("router.weight",)},
             sizes=_QWEN | {"inter": "intermediate_size"}),
    _mixtral("cohere2_moe", router=_softmax(_norm_key())),
    _mixtral("hunyuan_v1_moe", router={"score": Score.SOFTMAX, "norm": Norm.SUM},
             tensors={"gate_weight": ("gate.wg.weight",)}, shared=Shared.ADD,
             shared_layouts=(_shared("shared_mlp"),),
             sizes={"experts": "num_experts", "top_k": "moe_topk",
                    "inter": "moe_intermediate_size"}),
    _mixtral("phimoe", block="block_sparse_moe", layouts=(_W123, _STACKED), sizes=_LOCAL,
             router=_DATA | {"selection": Select.SPARSE_MIXER,
                             "mixer_eps": Key("router_jitter_noise", default=0.01)},
             tensors={"gate_weight": ("gate.weight", "router.weight")}),
    _mixtral("dbrx", block="ffn", prefix="transformer.blocks", layouts=(_DBRX,),
             router=_softmax(Norm.P, norm_p=Key("moe_normalize_expert_weights", default=1.0)),
             tensors={"gate_weight": ("router.layer.weight",)},
             sizes={"experts": "moe_num_experts", "top_k": "moe_top_k",
                    "inter": "ffn_hidden_size"}),
    _mixtral("gemma4", "gemma4_text", block="", strict=False, layouts=(_STACKED,),
             router=_softmax(Norm.SUM, input=RouterInput.RMS_SCALED,
                             rms_eps=Key("rms_norm_eps", default=1e-6)),
             activation={"kind": ActivationKind.GEGLU_TANH},
             tensors={"gate_weight": ("router.proj.weight",), "input_scale": ("router.scale",),
                      "per_expert_scale": ("router.per_expert_scale",)},
             sizes=_QWEN | {"top_k": "top_k_experts"}),
    _mixtral("granitemoe", block="block_sparse_moe", router=_SELECTED, tensors=_GRANITE_GATE,
             layouts=_GRANITE_LAYOUTS, sizes=_LOCAL),
    _mixtral("granitemoeshared", "granitemoehybrid", block="block_sparse_moe", router=_SELECTED,
             tensors=_GRANITE_GATE, layouts=_GRANITE_LAYOUTS, shared=Shared.ADD,
             shared_layouts=(Layout({"gate_up": "../shared_mlp.input_linear.weight",
                                     "down": "../shared_mlp.output_linear.weight"},
                                    GateLayout.GATE_THEN_UP),),
             sizes=_LOCAL | {"shared_inter": "shared_intermediate_size"}),
    _mixtral("jetmoe", router=_SELECTED, layouts=(_LINEAR,), sizes=_LOCAL,
             tensors={"gate_weight": ("router.layer.weight",), "output_bias": ("bias",)}),
    _mixtral("gpt_oss", router=_SELECTED | {"norm_precision": Precision.DATA},
             activation=_GPT_OSS_ACT, layouts=(_GPT_OSS,), sizes=_LOCAL,
             tensors={"gate_weight": ("router.weight",), "gate_bias": ("router.bias",)}),
    _mixtral("llama4", "llama4_text", block="feed_forward",
             prefix="language_model.model.layers",
             router=_DATA | {"score": Score.IDENTITY,
                             "weight_rule": WeightRule.SIGMOID_SELECTED},
             experts={"weight_position": WeightPosition.ON_INPUT},
             tensors={"gate_weight": ("router.weight",)}, layouts=(_stacked(**_IN_OUT), _PROJ),
             shared=Shared.ADD, shared_layouts=(_shared("shared_expert"),), sizes=_LOCAL),
    _mixtral("lfm2_moe", block="feed_forward", layouts=(_W123, _STACKED),
             router=_DATA | {"score": Score.SIGMOID, "score_precision": Precision.DATA,
                             "norm": _norm_key(), "norm_eps": 1e-6,
                             "norm_precision": Precision.DATA, "scale": _SCALE},
             tensors=_GATE | {"select_bias": ("expert_bias",)}, optional=("select_bias",)),
    _mixtral("longcat_flash",
             router={"score": Score.SOFTMAX, "scale": _SCALE},
             tensors={"gate_weight": ("router.classifier.weight",),
                      "select_bias": ("router.e_score_correction_bias",)},
             sizes={"experts": "n_routed_experts", "top_k": "moe_topk",
                    "inter": "expert_ffn_hidden_size", "zero_experts": "zero_expert_num"}),
    _mixtral("minimax_m2", block="block_sparse_moe", router=_M2, tensors=_GATE | _BIAS,
             layouts=(_W123, _STACKED), sizes=_LOCAL),
    _deepseek("minimax_m3_vl", "minimax_m3_vl_text", router=_M2 | {"scale": _SCALE},
              activation=_GPT_OSS_ACT, layouts=(_STACKED,), sizes=_LOCAL,
              shared_layouts=(Layout({"gate_up": "shared_experts.gate_up_proj.weight",
                                      "down": "shared_experts.down_proj.weight"},
                                     GateLayout.GATE_THEN_UP),)),
    _deepseek("ernie4_5_moe", router={"score": Score.SOFTMAX, "norm": Norm.CLAMP_SUM,
                                      "norm_eps": Key("moe_norm_min", default=1e-12)},
              tensors=_GATE | {"select_bias": ("moe_statics.e_score_correction_bias",
                                               "gate.moe_statics.e_score_correction_bias")},
              sizes={"experts": "moe_num_experts", "top_k": "moe_k",
                     "inter": "moe_intermediate_size"}),
    _deepseek("deepseek_v2", tensors=_GATE,
              router={"score": _score_key("softmax"), "scale": _SCALE, "group_fill": GroupFill.ZERO,
                      "selection": Key("topk_method", default="greedy",
                                    of={"greedy": Select.TOPK,
                                        "group_limited_greedy": Select.GROUP_TOPK}),
                      "num_groups": Key("n_group", default=1),
                      "top_groups": Key("topk_group", default=1), "group_top_m": 1}),
    _deepseek("deepseek_v3", "kimi_k2"),
    _deepseek("dots1"),
    _deepseek("glm4_moe", "glm4v_moe", "glm4v_moe_text"),
    _deepseek("glm4_moe_lite"),
    _deepseek("glm_moe_dsa"),
    _deepseek("solar_open"),
    _deepseek("exaone_moe", sizes=_QWEN),
    _deepseek("mimo_v2", "mimo_v2_flash"),
    _deepseek("kimi_linear", block="block_sparse_moe", layouts=(_W123, _STACKED),
              sizes=_QWEN | {"top_k": "num_experts_per_token"}),
    _deepseek("nemotron_h", block="mixer", prefix="backbone.layers",
              activation={"kind": Key("mlp_hidden_act", default="relu2",
                                      of={"relu2": ActivationKind.RELU2,
                                          "silu": ActivationKind.SILU})},
              layouts=(_PLAIN, _PLAIN_STACKED),
              shared_layouts=(Layout({"up": "shared_experts.up_proj.weight",
                                      "down": "shared_experts.down_proj.weight"},
                                     GateLayout.NONE),),
              sizes=_ROUTED | {"shared_inter": "moe_shared_expert_intermediate_size"}),
    _deepseek("afmoe", router=_sigmoid(score=Key("score_func", default="sigmoid", of=_SCORES),
                                       norm=_norm_key(True), group_fill=GroupFill.ZERO,
                                       scale=Key("route_scale", default=1.0)),
              tensors={"gate_weight": ("router.gate.weight",), "select_bias": ("expert_bias",)},
              sizes=_QWEN),
    _deepseek("bailing_moe", router=_softmax(_norm_key(True)), tensors=_GATE, sizes=_QWEN),
    _deepseek("bailing_moe_v2",
              router=_sigmoid(score=Key("score_function", default="sigmoid", of=_SCORES),
                              norm=_norm_key(True), group_fill=GroupFill.ZERO),
              tensors=_GATE | {"select_bias": ("gate.expert_bias",)}, optional=("select_bias",),
              sizes=_QWEN),
    _deepseek("deepseek_v4", block="ffn", prefix="layers",
              tensors=_GATE | {"select_bias": ("gate.bias", *_BIAS["select_bias"])},
              router={"score": _score_key("sqrtsoftplus"),
                      "norm": Norm.SUM, "norm_eps": 1e-20, "scale": _SCALE},
              activation={"kind": ActivationKind.CLAMP_SWIGLU, "limit": Key("swiglu_limit")},
              shared_activation={"kind": ActivationKind.SWIGLU}, layouts=(_W123, _STACKED, _PROJ),
              shared_layouts=(_split("shared_experts.", "w1", "w3", "w2"),
                              _shared("shared_experts"))),
    _deepseek("laguna",
              router={"score": Key("moe_router_score_func", default="sigmoid", of=_SCORES),
                      "logit_softcap": Key("moe_router_logit_softcapping", default=0.0),
                      "norm": Norm.SUM} | _DATA,
              experts={"output_scale": Key("moe_routed_scaling_factor", default=1.0)},
              tensors=_GATE | {"select_bias": ("experts.e_score_correction_bias",
                                               *_BIAS["select_bias"])},
              shared_layouts=(_shared("shared_expert"), _shared("shared_experts")), sizes=_QWEN),
    _deepseek("klear", "Klear",
              router={"score": Score.SIGMOID, "norm": _norm_key(True)},
              tensors=_GATE | {"select_bias": ("expert_bias",),
                               "shared_gate": ("coefficient.weight",),
                               "shared_gate_bias": ("coefficient.bias",)},
              shared=Shared.SOFTMAX2, sizes=_QWEN),
    _deepseek("step3p5", block="moe",
              router={"score": Score.SIGMOID, "norm_eps": 1e-20,
                      "norm": Key("norm_expert_weight", default=True, of=_NORM),
                      "scale": Key("moe_router_scaling_factor", default=1.0)},
              activation={"kind": ActivationKind.SWIGLU_CLAMP,
                          "limit": Key("swiglu_limits", default=0.0)},
              shared_activation={"kind": ActivationKind.SWIGLU_CLAMP,
                                 "limit": Key("swiglu_limits_shared", default=0.0)},
              tensors=_GATE | {"select_bias": ("router_bias", "gate.e_score_correction_bias")},
              layouts=(_split("", "gate_proj", "up_proj", "down_proj"), _STACKED),
              shared_layouts=(_shared("../share_expert"), _shared("shared_experts")),
              sizes={"experts": "moe_num_experts", "top_k": "moe_top_k",
                     "inter": "moe_intermediate_size"}),
)

USUAL = (_PROJ, _W123, _STACKED)
"""layouts to look for without a family"""
BY_MODEL_TYPE: dict[str, Family] = {
    model_type: family for family in FAMILIES for model_type in family.model_types
}
