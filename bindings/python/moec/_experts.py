# SPDX-License-Identifier: Apache-2.0
"""The experts of a layer: rows of a plan through the matrices, combined per token."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from . import _raw
from ._context import Context
from ._descriptors import ExpertsDesc, to_raw
from ._enums import DType, ExpertsFlags, GradFlags, PlanKind, Save
from ._errors import wrong_state
from ._handle import Handle
from ._plan import Plan
from ._tensors import Array, buffer, empty, set_tensors, stream_handle
from ._weights import Weights, WeightSet


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


def query_sizes(query: Callable[[Any, Any], Any], handle: Any) -> Sizes:
    """Sizes by moec_experts_query or moec_layer_query."""
    raw = _raw.moec_experts_sizes()
    query(handle, raw)
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


def set_buffers(
    args: Any, keep: list[Any], *, write: bool = True, stream: int = 0, **arrays: Array | None
) -> None:
    """Fill moec_buffer fields from arrays; None leaves a field absent."""
    for name, array in arrays.items():
        if array is not None:
            setattr(args, name, buffer(array, keep, write=write, stream=stream))


def gradient_like(weights: Weights, dtype: Any) -> WeightSet:
    """Arrays for the gradients of bound weights. ValueError when they hold no arrays."""
    if weights.set is None:
        raise ValueError("moec: these weights hold no arrays; give the gradients' arrays")
    return weights.set.empty_like(dtype)


@dataclass(kw_only=True, slots=True)
class ExpertsGradients:
    """Gradients of Experts.forward; None = not asked for."""

    x: Array | None = None
    routing_weights: Array | None = None
    """[T,K] f32; [P] f32 for EXPERT_CHOICE"""
    expert_weights: WeightSet | None = None
    shared_weights: WeightSet | None = None
    shared_gate: Array | None = None
    shared_gate_bias: Array | None = None
    output_bias: Array | None = None
    residual: Array | None = None


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


class Experts(Handle):
    """Immutable; kernels are chosen here by device, type and shape, never by timing.

    Raises UnsupportedError for a legal combination that is not implemented.
    """

    _free = _raw._core.moec_experts_free

    def __init__(self, context: Context, desc: ExpertsDesc) -> None:
        self.desc = desc
        self._pointer = _raw.moec_experts_create(context.raw, to_raw(desc, _raw.moec_experts_desc))
        self.sizes = query_sizes(_raw.moec_experts_query, self._pointer)

    def forward(
        self,
        plan: Plan,
        x: Array,
        weights: Weights,
        *,
        shared_weights: Weights | None = None,
        shared_gate: Array | None = None,
        shared_gate_bias: Array | None = None,
        output_bias: Array | None = None,
        residual: Array | None = None,
        out: Array | None = None,
        saved: Array | None = None,
        workspace: Array | None = None,
        flags: ExpertsFlags = ExpertsFlags.NONE,
        stream: Any = None,
    ) -> ExpertsResult:
        """y = residual + output_scale * sum_k w[t,k] expert(x[t]) + output_bias + shared(x[t]).

        x, residual, y [T,H] of desc.dtype (y may be the residual); shared_gate [1,H] or [2,H];
        shared_gate_bias [2]; output_bias [H]. saved and workspace: uint8 arrays of at least
        sizes.saved.bytes(T) and sizes.forward_workspace.bytes(T). Raises ShapeError, DTypeError,
        AliasError, MismatchError (plan or weights of another shape), StateError (plan not built).
        """
        keep: list[Any] = []
        handle = stream_handle(stream)
        y = empty(tuple(x.shape), x, x) if out is None else out
        saved = save_buffer(self.desc, self.sizes.saved, x, saved)
        inputs: dict[str, Any] = {
            "x": x, "shared_gate": shared_gate, "shared_gate_bias": shared_gate_bias,
            "output_bias": output_bias,
        }
        args = self._args(_raw.moec_experts_args(), plan, weights, shared_weights)
        args.flags = flags
        set_tensors(args, keep, stream=handle, residual=residual, **inputs)
        set_tensors(args, keep, write=True, stream=handle, y=y)
        set_buffers(args, keep, stream=handle, saved=saved, workspace=workspace)
        _raw.moec_experts_forward(self.raw, args, handle)
        return ExpertsResult(y, saved, plan, weights, shared_weights, inputs, plan.builds)

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
        if result.plan.builds != result.build:
            raise wrong_state(
                "moec.Experts.backward",
                f"the plan has been built {result.plan.builds} times and had been {result.build} "
                "times at the forward; call backward before building it again, or have a plan for "
                "each forward",
            )
        keep: list[Any] = []
        handle = stream_handle(stream)
        grads = self._new(result, d_y, want, grad_dtype) if into is None else into
        args = self._args(
            _raw.moec_experts_grad_args(), result.plan, result.weights, result.shared_weights
        )
        args.flags = flags
        given = {n: array for n, array in result.inputs.items() if n != "output_bias"}
        set_tensors(args, keep, stream=handle, d_y=d_y, **given)
        set_buffers(args, keep, write=False, stream=handle, saved=result.saved)
        set_buffers(args, keep, stream=handle, workspace=workspace)
        set_tensors(args, keep, write=True, stream=handle, d_x=grads.x,
                    d_routing_weights=grads.routing_weights, d_shared_gate=grads.shared_gate,
                    d_shared_gate_bias=grads.shared_gate_bias,
                    d_output_bias=grads.output_bias, d_residual=grads.residual)
        set_weight_gradients(args, keep, grads.expert_weights, grads.shared_weights, handle)
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
        args.plan = plan.raw
        args.weights = weights.raw
        if shared_weights is not None:
            args.shared_weights = shared_weights.raw
        return args

    def _new(
        self, result: ExpertsResult, d_y: Array, want: Collection[str], dtype: Any
    ) -> ExpertsGradients:
        tokens, hidden = d_y.shape
        rows: tuple[int, ...] = (tokens, self.desc.top_k)
        if result.plan.desc.kind == PlanKind.EXPERT_CHOICE:
            rows = (result.plan.num_rows,)
        shared = result.shared_weights

        def parameter(name: str) -> Callable[[], Any]:
            array = result.inputs[name]
            if array is None:
                return lambda: None
            return lambda: empty(tuple(array.shape), dtype or array, array)

        makers: dict[str, Callable[[], Any]] = {
            "x": lambda: empty((tokens, hidden), d_y, d_y),
            "routing_weights": lambda: empty(rows, DType.F32, d_y),
            "expert_weights": lambda: gradient_like(result.weights, dtype),
            "shared_weights": lambda: None if shared is None else gradient_like(shared, dtype),
            "residual": lambda: empty((tokens, hidden), d_y, d_y),
        }
        makers |= {n: parameter(n) for n in ("shared_gate", "shared_gate_bias", "output_bias")}
        return ExpertsGradients(**pick(makers, want))


def pick(makers: dict[str, Callable[[], Any]], want: Collection[str]) -> dict[str, Any]:
    """Make the wanted entries; a name that does not exist raises."""
    unknown = sorted(set(want) - set(makers))
    if unknown:
        raise ValueError(f"moec: no gradient {unknown[0]!r}; {', '.join(makers)} exist")
    return {name: makers[name]() for name in want}


def set_weight_gradients(
    args: Any,
    keep: list[Any],
    experts: WeightSet | None,
    shared: WeightSet | None,
    stream: int,
) -> None:
    """Point d_expert_weights and d_shared_weights at weight sets; None = frozen."""
    for name, value in (("d_expert_weights", experts), ("d_shared_weights", shared)):
        if value is not None:
            raw = value.raw(keep, write=True, stream=stream)
            keep.append(raw)
            setattr(args, name, raw)
