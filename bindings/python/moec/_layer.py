# SPDX-License-Identifier: Apache-2.0
"""The whole layer: gate -> route -> plan -> experts in one call, and its backward."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from . import _raw
from ._context import Context
from ._descriptors import ExpertsDesc, RouterDesc, to_raw
from ._enums import Drop, DType, GradFlags
from ._experts import (
    describe,
    gradient_like,
    pick,
    query_sizes,
    save_buffer,
    set_buffers,
    set_weight_gradients,
)
from ._handle import Handle
from ._tensors import Array, empty, set_tensors, stream_handle
from ._weights import Weights, WeightSet


@dataclass(kw_only=True, slots=True)
class LayerGradients:
    """Gradients of Layer.forward; None = not asked for."""

    x: Array | None = None
    """[T,H]; the router's part included unless router_x was given"""
    router_x: Array | None = None
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


@dataclass(slots=True)
class LayerResult:
    """Output of Layer.forward, with what its backward needs."""

    y: Array
    """[T,H], dtype of x"""
    logits: Array | None
    """[T,E+Z] f32, when wanted"""
    expert_ids: Array | None
    """[T,K] i32, when wanted"""
    routing_weights: Array | None
    """[T,K] f32, when wanted"""
    saved: Array | None
    weights: Weights = field(repr=False)
    shared_weights: Weights | None = field(repr=False)
    inputs: dict[str, Any] = field(repr=False)
    rng_offset: int = 0


class Layer(Handle):
    """Router and experts as one object. The descriptors' num_experts, num_zero_experts and top_k
    must agree. drop, capacity and capacity_factor are PlanDesc's.

    Raises InvalidArgumentError, MismatchError, UnsupportedError.
    """

    _free = _raw._core.moec_layer_free

    def __init__(
        self,
        context: Context,
        router: RouterDesc,
        experts: ExpertsDesc,
        *,
        drop: Drop = Drop.NONE,
        capacity: int = 0,
        capacity_factor: float = 0.0,
    ) -> None:
        self.router, self.experts = router, experts
        raw_router = to_raw(router, _raw.moec_router_desc)
        raw_experts = to_raw(experts, _raw.moec_experts_desc)
        desc = _raw.moec_layer_desc()
        desc.router, desc.experts = raw_router, raw_experts
        desc.drop, desc.capacity, desc.capacity_factor = drop, capacity, capacity_factor
        self._pointer = _raw.moec_layer_create(context.raw, desc)
        self.sizes = query_sizes(_raw.moec_layer_query, self._pointer)

    def forward(
        self,
        x: Array,
        weights: Weights,
        gate_weight: Array,
        *,
        shared_weights: Weights | None = None,
        router_x: Array | None = None,
        gate_bias: Array | None = None,
        input_scale: Array | None = None,
        select_bias: Array | None = None,
        per_expert_scale: Array | None = None,
        token_mask: Array | None = None,
        table: Array | None = None,
        token_ids: Array | None = None,
        given_ids: Array | None = None,
        shared_gate: Array | None = None,
        shared_gate_bias: Array | None = None,
        output_bias: Array | None = None,
        residual: Array | None = None,
        rng_offset: int = 0,
        want: Collection[str] = (),
        counts: Array | None = None,
        out: Array | None = None,
        saved: Array | None = None,
        workspace: Array | None = None,
        stream: Any = None,
    ) -> LayerResult:
        """y [T,H] of x [T,H], dtype of the experts' descriptor.

        gate_weight [E+Z,H] and the other router inputs are Router.gate's and Router.route's,
        shared_gate to residual Experts.forward's. `want` names further outputs: "logits",
        "expert_ids", "routing_weights". counts [E+Z] i32 is added to. saved and workspace are uint8
        arrays of at least sizes.*.bytes(T); made when absent.
        """
        keep: list[Any] = []
        handle = stream_handle(stream)
        inputs: dict[str, Any] = {
            "x": x, "router_x": router_x, "gate_weight": gate_weight, "gate_bias": gate_bias,
            "input_scale": input_scale, "select_bias": select_bias,
            "per_expert_scale": per_expert_scale, "token_mask": token_mask, "table": table,
            "token_ids": token_ids, "given_ids": given_ids, "shared_gate": shared_gate,
            "shared_gate_bias": shared_gate_bias, "output_bias": output_bias,
            "residual": residual,
        }
        tokens, ids = x.shape[0], self.router.num_experts + self.router.num_zero_experts
        makers: dict[str, Callable[[], Any]] = {
            "logits": lambda: empty((tokens, ids), DType.F32, x),
            "expert_ids": lambda: empty((tokens, self.router.top_k), DType.I32, x),
            "routing_weights": lambda: empty((tokens, self.router.top_k), DType.F32, x),
        }
        extra = dict.fromkeys(makers) | pick(makers, want)
        y = empty(tuple(x.shape), x, x) if out is None else out
        saved = save_buffer(self.experts, self.sizes.saved, x, saved)
        result = LayerResult(
            y, **extra, saved=saved, weights=weights, shared_weights=shared_weights,
            inputs=inputs, rng_offset=rng_offset,
        )
        args = self._forward_args(result, keep, handle)
        set_tensors(args, keep, write=True, stream=handle, y=y, counts=counts, **extra)
        set_buffers(args, keep, stream=handle, saved=saved, workspace=workspace)
        _raw.moec_layer_forward(self.raw, args, handle)
        return result

    def backward(
        self,
        result: LayerResult,
        d_y: Array,
        want: Collection[str] | None = None,
        *,
        d_logits: Array | None = None,
        into: LayerGradients | None = None,
        grad_dtype: Any = None,
        flags: GradFlags = GradFlags.NONE,
        workspace: Array | None = None,
        stream: Any = None,
    ) -> LayerGradients:
        """Gradients named in `want` (fields of LayerGradients) for d_y [T,H].

        want        None: x and every parameter that forward() was given
        d_logits    [T,E+Z] f32 from auxiliary losses, added to the logits' gradient
        into        existing arrays to write (to add to, with GradFlags); replaces `want`
        grad_dtype  of new parameter gradients: None = the parameter's, or "f32"
        """
        keep: list[Any] = []
        handle = stream_handle(stream)
        grads = self._new(result, d_y, want, grad_dtype) if into is None else into
        forward = self._forward_args(result, keep, handle)
        set_buffers(forward, keep, write=False, stream=handle, saved=result.saved)
        args = _raw.moec_layer_grad_args()
        args.flags = flags
        args.forward = forward
        set_tensors(args, keep, stream=handle, d_y=d_y, d_logits_in=d_logits)
        set_buffers(args, keep, stream=handle, workspace=workspace)
        names = set(LayerGradients.__slots__) - {"expert_weights", "shared_weights"}
        arrays = {f"d_{name}": getattr(grads, name) for name in names}
        set_tensors(args, keep, write=True, stream=handle, **arrays)
        set_weight_gradients(args, keep, grads.expert_weights, grads.shared_weights, handle)
        _raw.moec_layer_backward(self.raw, args, handle)
        return grads

    def describe(self, num_tokens: int, weights: Weights) -> dict[str, Any]:
        """Kernels, tiles and bytes for T tokens with these weights."""
        text: dict[str, Any] = describe(_raw.moec_layer_describe, self.raw, weights, num_tokens)
        return text

    @staticmethod
    def _forward_args(result: LayerResult, keep: list[Any], handle: int) -> Any:
        args = _raw.moec_layer_args()
        args.rng_offset = result.rng_offset
        args.weights = result.weights.raw
        if result.shared_weights is not None:
            args.shared_weights = result.shared_weights.raw
        set_tensors(args, keep, stream=handle, **result.inputs)
        return args

    def _new(
        self, result: LayerResult, d_y: Array, want: Collection[str] | None, dtype: Any
    ) -> LayerGradients:
        given = result.inputs
        parameters = ("gate_weight", "gate_bias", "input_scale", "per_expert_scale",
                      "shared_gate", "shared_gate_bias", "output_bias")
        if want is None:
            names = ["x", *(name for name in parameters if given[name] is not None)]
            names += ["router_x"] if given["router_x"] is not None else []
            names += ["expert_weights"] if result.weights.set is not None else []
            shared = result.shared_weights
            names += ["shared_weights"] if shared is not None and shared.set is not None else []
            want = names

        def parameter(name: str) -> Callable[[], Any]:
            array = given[name]
            if array is None:
                return lambda: None
            return lambda: empty(tuple(array.shape), dtype or array, array)

        def weight_set(weights: Weights | None) -> Callable[[], Any]:
            return lambda: None if weights is None else gradient_like(weights, dtype)

        makers: dict[str, Callable[[], Any]] = {name: parameter(name) for name in parameters}
        makers |= {
            name: lambda: empty(tuple(d_y.shape), d_y, d_y)
            for name in ("x", "residual")
        }
        router_x = given["router_x"]
        makers["router_x"] = lambda: (
            None if router_x is None else empty(tuple(router_x.shape), router_x, router_x)
        )
        makers["expert_weights"] = weight_set(result.weights)
        makers["shared_weights"] = weight_set(result.shared_weights)
        makers["routing_weights"] = lambda: empty(
            (d_y.shape[0], self.router.top_k), DType.F32, d_y
        )
        return LayerGradients(**pick(makers, want))
