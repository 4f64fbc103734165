# SPDX-License-Identifier: Apache-2.0
# Generated from moec.h by generate.py; do not edit.
"""The arrays of each call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from ._adapters import Adapter
from ._tensors import Array
from ._weights import WeightSet

INPUTS: dict[str, tuple[str, ...]] = {
    "moec_gate_args": (
        "x", "weight", "bias", "input_scale"
    ),
    "moec_gate_grad_args": (
        "x", "weight", "input_scale", "d_logits", "d_x_jittered"
    ),
    "moec_route_args": (
        "logits", "select_bias", "per_expert_scale", "token_mask", "table", "token_ids", "given_ids"
    ),
    "moec_route_grad_args": (
        "logits", "per_expert_scale", "expert_ids", "d_routing_weights", "d_logits_in"
    ),
    "moec_loss_args": (
        "counts", "token_mask", "d_loss"
    ),
    "moec_permute_args": (
        "x", "x_scale"
    ),
    "moec_unpermute_args": (
        "rows", "routing_weights", "residual"
    ),
    "moec_permute_grad_args": (
        "d_rows", "d_row_weight"
    ),
    "moec_unpermute_grad_args": (
        "d_y", "rows", "routing_weights"
    ),
    "moec_quantise_args": (
        "source",
    ),
    "moec_experts_args": (
        "x", "shared_gate", "shared_gate_bias", "output_bias", "residual", "adapter_ids"
    ),
    "moec_experts_grad_args": (
        "x", "shared_gate", "shared_gate_bias", "d_y", "adapter_ids"
    ),
    "moec_layer_args": (
        "x", "router_x", "gate_weight", "gate_bias", "input_scale", "select_bias",
        "per_expert_scale", "token_mask", "table", "token_ids", "given_ids", "shared_gate",
        "shared_gate_bias", "output_bias", "residual", "adapter_ids"
    ),
    "moec_layer_grad_args": (
        "d_y", "d_logits_in"
    ),
    "moec_ep_args": (
        "x", "x_beside", "expert_ids", "routing_weights", "d_guest_weights"
    ),
}
"""struct -> the arrays that its call reads"""

GRADIENTS: dict[str, tuple[str, ...]] = {
    "moec_gate_grad_args": (
        "x", "weight", "bias", "input_scale"
    ),
    "moec_route_grad_args": (
        "logits", "per_expert_scale"
    ),
    "moec_permute_grad_args": (
        "x", "routing_weights"
    ),
    "moec_unpermute_grad_args": (
        "rows", "routing_weights"
    ),
    "moec_experts_grad_args": (
        "x", "routing_weights", "shared_gate", "shared_gate_bias", "output_bias", "residual"
    ),
    "moec_layer_grad_args": (
        "x", "router_x", "gate_weight", "gate_bias", "input_scale", "per_expert_scale",
        "shared_gate", "shared_gate_bias", "output_bias", "residual", "routing_weights"
    ),
}
"""struct -> the arrays whose gradients its call writes, into d_..."""


class GateInputs(TypedDict, total=False):
    """Arrays of moec_gate_args."""

    bias: Array | None
    """[E+Z], with LOGIT_BIAS; dtype of weight or f32"""
    input_scale: Array | None
    """[H], RMS_SCALED; dtype of weight or f32"""


class RouteInputs(TypedDict, total=False):
    """Arrays of moec_route_args."""

    select_bias: Array | None
    """[E+Z] f32, with SELECT_BIAS"""
    per_expert_scale: Array | None
    """[E+Z], with PER_EXPERT_SCALE; f32|bf16|f16"""
    token_mask: Array | None
    """[T] u8|bool, optional; 0 = routed nowhere"""
    table: Array | None
    """[V,K] i32|i64: SELECT_TABLE"""
    token_ids: Array | None
    """[T] i32|i64: SELECT_TABLE"""
    given_ids: Array | None
    """[T,K] i32|i64: SELECT_GIVEN"""


class ExpertsInputs(TypedDict, total=False):
    """Arrays of moec_experts_args."""

    shared_gate: Array | None
    """[1,H] or [2,H]; dtype of x or f32"""
    shared_gate_bias: Array | None
    """[2], SOFTMAX2; dtype of x or f32"""
    output_bias: Array | None
    """[H], optional; dtype of x or f32"""
    residual: Array | None
    """[T,H], optional: added; may be y itself"""
    adapter_ids: Array | None
    """[T] i32, optional: the only adapter of each token, an index into what is bound; any other
    number = none"""


class LayerInputs(TypedDict, total=False):
    """Arrays of moec_layer_args."""

    router_x: Array | None
    """[T,Hr], optional: the router's input when it is not x; where Hr > H the call may take scratch
    of the context besides its workspace"""
    gate_bias: Array | None
    """[E+Z], with LOGIT_BIAS; dtype of weight or f32"""
    input_scale: Array | None
    """[H], RMS_SCALED; dtype of weight or f32"""
    select_bias: Array | None
    """[E+Z] f32, with SELECT_BIAS"""
    per_expert_scale: Array | None
    """[E+Z], with PER_EXPERT_SCALE; f32|bf16|f16"""
    token_mask: Array | None
    """[T] u8|bool, optional; 0 = routed nowhere"""
    table: Array | None
    """[V,K] i32|i64: SELECT_TABLE"""
    token_ids: Array | None
    """[T] i32|i64: SELECT_TABLE"""
    given_ids: Array | None
    """[T,K] i32|i64: SELECT_GIVEN"""
    shared_gate: Array | None
    """[1,H] or [2,H]; dtype of x or f32"""
    shared_gate_bias: Array | None
    """[2], SOFTMAX2; dtype of x or f32"""
    output_bias: Array | None
    """[H], optional; dtype of x or f32"""
    residual: Array | None
    """[T,H], optional: added; may be y itself"""
    adapter_ids: Array | None
    """[T] i32, optional: the only adapter of each token, an index into what is bound; any other
    number = none"""


@dataclass(kw_only=True, slots=True)
class ExpertsGradients:
    """Gradients of Experts.forward; None = not asked for."""

    x: Array | None = None
    """[T,H]; absent = skipped, as each output"""
    routing_weights: Array | None = None
    """[T,K] f32; EXPERT_CHOICE: [P], one a row"""
    expert_weights: WeightSet | None = None
    """in the layout of the bound weights; f32 or their dtype; NULL = frozen"""
    shared_weights: WeightSet | None = None
    """in the layout of the bound weights; f32 or their dtype; NULL = frozen"""
    shared_gate: Array | None = None
    """f32 or dtype of x"""
    shared_gate_bias: Array | None = None
    """f32 or dtype of x"""
    output_bias: Array | None = None
    """f32 or dtype of x"""
    residual: Array | None = None
    """[T,H]"""
    adapters: list[Adapter] | None = None
    """out, optional: the gradients of as many adapters as are bound, each factor where it is
    given"""


@dataclass(kw_only=True, slots=True)
class LayerGradients:
    """Gradients of Layer.forward; None = not asked for."""

    x: Array | None = None
    """[T,H]; without router_x, d_x holds both"""
    router_x: Array | None = None
    """[T,Hr]; without router_x, d_x holds both"""
    gate_weight: Array | None = None
    gate_bias: Array | None = None
    input_scale: Array | None = None
    per_expert_scale: Array | None = None
    expert_weights: WeightSet | None = None
    shared_weights: WeightSet | None = None
    shared_gate: Array | None = None
    shared_gate_bias: Array | None = None
    output_bias: Array | None = None
    residual: Array | None = None
    routing_weights: Array | None = None
    """[T,K] f32, optional"""
    adapters: list[Adapter] | None = None
    """out, optional: as moec_experts_grad_args"""
