# SPDX-License-Identifier: Apache-2.0
"""The whole layer: gate -> route -> plan -> experts in one call, and its backward."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from typing import Any, Unpack

from . import _raw
from ._adapters import Adapters
from ._arguments import (
    inputs_of,
    new_gradients,
    pick,
    set_adapter_gradients,
    set_adapters,
    set_buffers,
    set_weight_gradients,
)
from ._context import Context, context_of
from ._descriptors import ExpertsDesc, RouterDesc, to_raw
from ._enums import Drop, DType, GradFlags
from ._ep import EP
from ._experts import describe, query_sizes, save_buffer
from ._fields import GRADIENTS, LayerGradients, LayerInputs
from ._handle import Handle, handle_of, need
from ._tensors import Array, empty, require, set_tensors, stream_handle
from ._weights import Weights


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
    adapters: Adapters | None = field(repr=False, default=None)


class Layer(Handle):
    """Router and experts as one object. The descriptors' num_experts, num_zero_experts and top_k
    must agree. drop, capacity and capacity_factor are PlanDesc's. With an ep the weights are the
    experts of this rank, and forward and backward are collective.

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
        ep: EP | None = None,
    ) -> None:
        self.router, self.experts, self.ep = router, experts, ep
        raw_router = to_raw(router, _raw.moec_router_desc, "router")
        raw_experts = to_raw(experts, _raw.moec_experts_desc, "experts")
        desc = _raw.moec_layer_desc()
        desc.router, desc.experts = raw_router, raw_experts
        desc.drop, desc.capacity, desc.capacity_factor = drop, capacity, capacity_factor
        if ep is not None:
            desc.ep = handle_of("ep", ep, EP)
        self._pointer = _raw.moec_layer_create(context_of(context), desc)
        self.sizes = query_sizes(_raw.moec_layer_query, self._pointer)

    def sizes_with(self, adapters: Adapters | None) -> Sizes:
        """Memory of calls with adapters as they are bound now."""
        if adapters is None:
            return self.sizes
        held = handle_of("adapters", adapters, Adapters)
        return query_sizes(_raw.moec_layer_query_adapters, self.raw, held)

    def forward(
        self,
        x: Array,
        weights: Weights,
        gate_weight: Array,
        *,
        shared_weights: Weights | None = None,
        adapters: Adapters | None = None,
        rng_offset: int = 0,
        want: Collection[str] = (),
        counts: Array | None = None,
        out: Array | None = None,
        saved: Array | None = None,
        workspace: Array | None = None,
        stream: Any = None,
        **others: Unpack[LayerInputs],
    ) -> LayerResult:
        """y [T,H] of x [T,H], dtype of the experts' descriptor.

        gate_weight [E+Z,H] and others are inputs of Router.gate, Router.route and Experts.forward,
        and router_x (_fields.LayerInputs has the shapes). `want` names further outputs: "logits",
        "expert_ids", "routing_weights". counts [E+Z] i32 or i64 is added to. saved and workspace
        are uint8 arrays of at least sizes.*.bytes(T), of sizes_with(adapters) where there are any;
        made when absent.
        """
        require(x=x)
        keep: list[Any] = []
        handle = stream_handle(stream)
        given = {"x": x, "gate_weight": gate_weight, **others}
        inputs = inputs_of("Layer.forward", "moec_layer_args", given)
        tokens, ids = x.shape[0], self.router.num_experts + self.router.num_zero_experts
        makers: dict[str, Callable[[], Any]] = {
            "logits": lambda: empty((tokens, ids), DType.F32, x),
            "expert_ids": lambda: empty((tokens, self.router.top_k), DType.I32, x),
            "routing_weights": lambda: empty((tokens, self.router.top_k), DType.F32, x),
        }
        extra = dict.fromkeys(makers) | pick(makers, want)
        y = empty(tuple(x.shape), x, x) if out is None else out
        saved = save_buffer(self.experts, self.sizes_with(adapters).saved, x, saved)
        result = LayerResult(
            y, **extra, saved=saved, weights=weights, shared_weights=shared_weights,
            inputs=inputs, rng_offset=rng_offset, adapters=adapters,
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
        need("result", result, LayerResult)
        require(d_y=d_y)
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
        written = {f"d_{n}": getattr(grads, n) for n in GRADIENTS["moec_layer_grad_args"]}
        set_tensors(args, keep, write=True, stream=handle, **written)
        set_weight_gradients(args, keep, grads.expert_weights, grads.shared_weights, handle)
        set_adapter_gradients(args, keep, grads.adapters, result.adapters, handle)
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
        args.weights = handle_of("weights", result.weights, Weights)
        if result.shared_weights is not None:
            args.shared_weights = handle_of("shared_weights", result.shared_weights, Weights)
        set_adapters(args, result.adapters)
        set_tensors(args, keep, stream=handle, **result.inputs)
        return args

    def _new(
        self, result: LayerResult, d_y: Array, want: Collection[str] | None, dtype: Any
    ) -> LayerGradients:
        if want is None:
            given = {n for n, array in result.inputs.items() if array is not None}
            sets = {"expert_weights": result.weights, "shared_weights": result.shared_weights}
            given |= {n for n, held in sets.items() if held is not None and held.set is not None}
            given |= {"adapters"} if result.adapters is not None else set()
            want = [item.name for item in fields(LayerGradients)
                    if item.name in given and item.name != "residual"]
        return new_gradients(
            LayerGradients, want, d_y, inputs=result.inputs, weights=result.weights,
            shared_weights=result.shared_weights, adapters=result.adapters,
            routing_shape=(d_y.shape[0], self.router.top_k), dtype=dtype,
        )
