# SPDX-License-Identifier: Apache-2.0
"""The experts of a layer: rows of a plan through the matrices, combined per token."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Unpack

from . import _raw
from ._adapters import Adapters
from ._arguments import (
    inputs_of,
    new_gradients,
    set_adapter_gradients,
    set_adapters,
    set_buffers,
    set_weight_gradients,
)
from ._context import Context, context_of
from ._descriptors import ExpertsDesc, to_raw
from ._enums import DType, ExpertsFlags, GradFlags, PlanKind, Save
from ._errors import wrong_state
from ._fields import GRADIENTS, INPUTS, ExpertsGradients, ExpertsInputs
from ._handle import Handle, handle_of, need
from ._plan import Plan
from ._tensors import Array, empty, require, set_tensors, stream_handle
from ._weights import Weights


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes for T tokens: base + T * per_token, exact."""

    base: int
    per_token: int

    def bytes(self, num_tokens: int) -> int:
        return self.base + num_tokens * self.per_token


@dataclass(frozen=True, slots=True)
class Sizes:
    """Memory of a call, independent of the routing."""

    forward_workspace: Size
    backward_workspace: Size
    saved: Size


def query_sizes(query: Callable[..., Any], handle: Any, *adapters: Any) -> Sizes:
    """Sizes by moec_experts_query or moec_layer_query, or those of calls with adapters."""
    raw = _raw.moec_experts_sizes()
    query(handle, *adapters, raw)
    parts = (raw.forward_workspace, raw.backward_workspace, raw.saved)
    return Sizes(*(Size(part.base, part.per_token) for part in parts))


def describe(function: Callable[..., Any], handle: Any, weights: Weights, t: int) -> Any:
    """Parsed JSON of moec_experts_describe or moec_layer_describe."""
    text = bytearray(function(handle, weights.raw, t, None))
    function(handle, weights.raw, t, text)
    return json.loads(bytes(text).rstrip(b"\0"))


def save_buffer(desc: ExpertsDesc, size: Size, x: Array, given: Array | None) -> Array | None:
    """The caller's saved buffer, or a new one of the exact size; None for inference."""
    if desc.save == Save.NONE or given is not None:
        return given
    return empty((size.bytes(x.shape[0]),), DType.U8, x)


@dataclass(slots=True)
class ExpertsResult:
    """Output of Experts.forward, with what its backward needs."""

    y: Array
    """[T,H], dtype of x"""
    saved: Array | None
    plan: Plan = field(repr=False)
    weights: Weights = field(repr=False)
    shared_weights: Weights | None = field(repr=False)
    inputs: dict[str, Any] = field(repr=False)
    build: int = field(repr=False)
    """the plan's `builds` at the time"""
    adapters: Adapters | None = field(repr=False, default=None)


class Experts(Handle):
    """Immutable; kernels are chosen here by device, type and shape, never by timing.

    Raises UnsupportedError for a legal combination that is not implemented.
    """

    _free = _raw._core.moec_experts_free

    def __init__(self, context: Context, desc: ExpertsDesc) -> None:
        self.desc = desc
        raw = to_raw(desc, _raw.moec_experts_desc)
        self._pointer = _raw.moec_experts_create(context_of(context), raw)
        self.sizes = query_sizes(_raw.moec_experts_query, self._pointer)

    def sizes_with(self, adapters: Adapters | None) -> Sizes:
        """Memory of calls with adapters as they are bound now."""
        if adapters is None:
            return self.sizes
        held = handle_of("adapters", adapters, Adapters)
        return query_sizes(_raw.moec_experts_query_adapters, self.raw, held)

    def forward(
        self,
        plan: Plan,
        x: Array,
        weights: Weights,
        *,
        shared_weights: Weights | None = None,
        adapters: Adapters | None = None,
        out: Array | None = None,
        saved: Array | None = None,
        workspace: Array | None = None,
        flags: ExpertsFlags = ExpertsFlags.NONE,
        stream: Any = None,
        **others: Unpack[ExpertsInputs],
    ) -> ExpertsResult:
        """y = residual + output_scale * sum_k w[t,k] expert(x[t]) + output_bias + shared(x[t]).

        x and y [T,H] of desc.dtype (y may be the residual); others: the arrays of
        _fields.ExpertsInputs. saved and workspace: uint8 arrays of at least
        sizes.saved.bytes(T) and sizes.forward_workspace.bytes(T), of sizes_with(adapters) where
        there are any. Raises ShapeError, DTypeError,
        AliasError, MismatchError (plan or weights of another shape), StateError (plan not built).
        """
        require(x=x)
        keep: list[Any] = []
        handle = stream_handle(stream)
        y = empty(tuple(x.shape), x, x) if out is None else out
        saved = save_buffer(self.desc, self.sizes_with(adapters).saved, x, saved)
        inputs = inputs_of("Experts.forward", "moec_experts_args", {"x": x, **others})
        args = self._args(_raw.moec_experts_args(), plan, weights, shared_weights)
        args.flags = flags
        set_adapters(args, adapters)
        set_tensors(args, keep, stream=handle, **inputs)
        set_tensors(args, keep, write=True, stream=handle, y=y)
        set_buffers(args, keep, stream=handle, saved=saved, workspace=workspace)
        _raw.moec_experts_forward(self.raw, args, handle)
        return ExpertsResult(y, saved, plan, weights, shared_weights, inputs, plan.builds, adapters)

    def backward(
        self,
        result: ExpertsResult,
        d_y: Array,
        want: Collection[str] = ("x", "routing_weights", "expert_weights"),
        *,
        into: ExpertsGradients | None = None,
        grad_dtype: Any = None,
        flags: GradFlags = GradFlags.NONE,
        workspace: Array | None = None,
        stream: Any = None,
    ) -> ExpertsGradients:
        """Gradients named in `want` (fields of ExpertsGradients) for d_y [T,H].

        into        existing arrays to write (to add to, with GradFlags); replaces `want`
        grad_dtype  of new parameter gradients: None = the parameter's, or "f32"

        Raises StateError when the plan was built again after the forward.
        """
        need("result", result, ExpertsResult)
        if result.plan.builds != result.build:
            raise wrong_state(
                "moec.Experts.backward",
                f"the plan has been built {result.plan.builds} times and had been {result.build} "
                "times at the forward; call backward before building it again, or have a plan for "
                "each forward",
            )
        require(d_y=d_y)
        keep: list[Any] = []
        handle = stream_handle(stream)
        grads = self._new(result, d_y, want, grad_dtype) if into is None else into
        args = self._args(
            _raw.moec_experts_grad_args(), result.plan, result.weights, result.shared_weights
        )
        args.flags = flags
        set_adapters(args, result.adapters)
        read = {n: result.inputs[n] for n in INPUTS["moec_experts_grad_args"] if n != "d_y"}
        set_tensors(args, keep, stream=handle, d_y=d_y, **read)
        set_buffers(args, keep, write=False, stream=handle, saved=result.saved)
        set_buffers(args, keep, stream=handle, workspace=workspace)
        written = {f"d_{n}": getattr(grads, n) for n in GRADIENTS["moec_experts_grad_args"]}
        set_tensors(args, keep, write=True, stream=handle, **written)
        set_weight_gradients(args, keep, grads.expert_weights, grads.shared_weights, handle)
        set_adapter_gradients(args, keep, grads.adapters, result.adapters, handle)
        _raw.moec_experts_backward(self.raw, args, handle)
        return grads

    def describe(self, num_tokens: int, weights: Weights) -> dict[str, Any]:
        """Kernels, tiles and bytes for T tokens with these weights."""
        text: dict[str, Any] = describe(
            _raw.moec_experts_describe, self.raw, weights, num_tokens
        )
        return text

    @staticmethod
    def _args(args: Any, plan: Plan, weights: Weights, shared_weights: Weights | None) -> Any:
        args.plan = handle_of("plan", plan, Plan)
        args.weights = handle_of("weights", weights, Weights)
        if shared_weights is not None:
            args.shared_weights = handle_of("shared_weights", shared_weights, Weights)
        return args

    def _new(
        self, result: ExpertsResult, d_y: Array, want: Collection[str], dtype: Any
    ) -> ExpertsGradients:
        shape: tuple[int, ...] = (d_y.shape[0], self.desc.top_k)
        if result.plan.desc.kind == PlanKind.EXPERT_CHOICE:
            shape = (result.plan.num_rows,)
        return new_gradients(
            ExpertsGradients, want, d_y, inputs=result.inputs, weights=result.weights,
            shared_weights=result.shared_weights, adapters=result.adapters,
            routing_shape=shape, dtype=dtype,
        )
