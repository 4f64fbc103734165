# SPDX-License-Identifier: Apache-2.0
"""The routing plan as an object: build, inspect, save, replay; and the rows it moves."""

from __future__ import annotations

from typing import Any, NamedTuple, Self, Unpack

from . import _raw
from ._arguments import inputs_of
from ._context import Context, context_of
from ._descriptors import PlanDesc, to_raw
from ._enums import PlanField, PlanRule
from ._fields import RouteInputs
from ._handle import Handle, handle_of
from ._router import Router
from ._tensors import Array, borrow, buffer, empty, require, set_tensors, stream_handle, tensor


class Totals(NamedTuple):
    """Counts of a built plan."""

    routed_rows: int
    rows: int
    """P in use: routed rows and padding"""
    dropped: int
    largest_group: int


def plan_size(desc: PlanDesc) -> tuple[int, int]:
    """(bytes of a plan's memory, bound of P) for desc.max_tokens tokens."""
    num_bytes, max_rows = _raw.moec_plan_size(to_raw(desc, _raw.moec_plan_desc))
    return num_bytes, max_rows


class Plan(Handle):
    """The routing of one batch, sorted by expert. Rebuilt in place by the from_* methods.

    memory: at least plan_size(desc)[0] bytes of the caller's (uint8 array); None: the library's.
    builds: how often it was built; backward needs the plan as its forward had it.
    """

    _free = _raw._core.moec_plan_free

    def __init__(self, context: Context, desc: PlanDesc, *, memory: Array | None = None) -> None:
        self.desc, self.builds = desc, 0
        self._memory: list[Any] = []
        raw_memory = None if memory is None else buffer(memory, self._memory, "memory")
        raw_desc = to_raw(desc, _raw.moec_plan_desc)
        self._pointer = _raw.moec_plan_create(context_of(context), raw_desc, raw_memory)

    @property
    def num_local(self) -> int:
        """El, experts of the local range."""
        return (self.desc.expert_end - self.desc.expert_begin) or self.desc.num_experts

    def _built(self) -> Self:
        self.builds += 1
        return self

    def from_topk(
        self, expert_ids: Array, routing_weights: Array | None = None, *, stream: Any = None
    ) -> Self:
        """Build from expert_ids [T,K] (i32 or i64) and routing_weights [T,K] f32 (absent: 1)."""
        keep: list[Any] = []
        handle = stream_handle(stream)
        raw_ids = tensor(expert_ids, keep, "expert_ids", stream=handle)
        raw_weights = (
            None if routing_weights is None
            else tensor(routing_weights, keep, "routing_weights", stream=handle)
        )
        _raw.moec_plan_from_topk(self.raw, raw_ids, raw_weights, handle)
        return self._built()

    def from_logits(
        self,
        router: Router,
        logits: Array,
        *,
        counts: Array | None = None,
        stream: Any = None,
        **others: Unpack[RouteInputs],
    ) -> Self:
        """Route logits [T,E+Z] and build; others are Router.route's."""
        keep: list[Any] = []
        handle = stream_handle(stream)
        args = _raw.moec_route_args()
        inputs = inputs_of("Plan.from_logits", "moec_route_args", {"logits": logits, **others})
        set_tensors(args, keep, stream=handle, **inputs)
        set_tensors(args, keep, write=True, stream=handle, counts=counts)
        raw_router = handle_of("router", router, Router)
        _raw.moec_plan_from_logits(self.raw, raw_router, args, handle)
        return self._built()

    def from_map(
        self, routing_map: Array, probs: Array | None = None, *, stream: Any = None
    ) -> Self:
        """Build from routing_map [T,E] (u8, bool, i32; non-zero = routed) and probs [T,E] f32.

        Raises IndexOverflowError when a token has more than top_k experts.
        """
        keep: list[Any] = []
        handle = stream_handle(stream)
        raw_map = tensor(routing_map, keep, "routing_map", stream=handle)
        raw_probs = None if probs is None else tensor(probs, keep, "probs", stream=handle)
        _raw.moec_plan_from_map(self.raw, raw_map, raw_probs, handle)
        return self._built()

    def from_rule(
        self, rule: PlanRule, num_tokens: int, routing_weights: Array | None = None, *,
        stream: Any = None,
    ) -> Self:
        """Build from ids that a rule gives, and routing_weights [T,K] f32 (absent: 1).

        ROUND_ROBIN: slot k of token t has expert (t K + k) mod E: forced balance, for benchmarks.
        EQUAL_COUNTS: x [El,C,H] seen as [El C,H], C rows of each local expert.
        """
        keep: list[Any] = []
        handle = stream_handle(stream)
        raw_weights = (
            None if routing_weights is None
            else tensor(routing_weights, keep, "routing_weights", stream=handle)
        )
        _raw.moec_plan_from_rule(self.raw, rule, num_tokens, raw_weights, handle)
        return self._built()

    def from_scores(
        self, scores: Array, token_mask: Array | None = None, *, stream: Any = None
    ) -> Self:
        """PlanKind.EXPERT_CHOICE: scores [T,E] f32; token_mask [T] u8 or bool."""
        keep: list[Any] = []
        handle = stream_handle(stream)
        raw_scores = tensor(scores, keep, "scores", stream=handle)
        raw_mask = (
            None if token_mask is None else tensor(token_mask, keep, "token_mask", stream=handle)
        )
        _raw.moec_plan_from_scores(self.raw, raw_scores, raw_mask, handle)
        return self._built()

    def attach(self, num_tokens: int) -> Self:
        """Adopt a plan already present in the caller's memory."""
        _raw.moec_plan_attach(self.raw, num_tokens)
        return self._built()

    @property
    def num_rows(self) -> int:
        """P of this batch: how many rows permuted arrays have, whatever the routing."""
        raw = _raw.moec_tensor()
        _raw.moec_plan_view(self.raw, PlanField.ROW_TOKEN, raw)
        return int(_raw.tensor_describe(raw)[-1][0])

    def view(self, field: PlanField) -> Any:
        """Borrowed read-only view of one array; valid until the plan is rebuilt or closed."""
        raw = _raw.moec_tensor()
        _raw.moec_plan_view(self.raw, field, raw)
        return borrow(raw, self)

    def export(self, field: PlanField, out: Array, *, stream: Any = None) -> Array:
        """Copy one array into `out`: the field's shape; i32 or i64, WEIGHTS and ROW_WEIGHT f32."""
        keep: list[Any] = []
        handle = stream_handle(stream)
        raw = tensor(out, keep, "out", write=True, stream=handle)
        _raw.moec_plan_export(self.raw, field, raw, handle)
        return out

    def totals(self, *, stream: Any = None) -> Totals:
        """Host copy of the totals; waits for the stream."""
        return Totals(*_raw.moec_plan_totals_sync(self.raw, stream_handle(stream)))

    def save(self, *, stream: Any = None) -> bytes:
        """Serialised form: versioned, checksummed. Waits for the stream."""
        handle = stream_handle(stream)
        data = bytearray(_raw.moec_plan_save_sync(self.raw, None, handle))
        _raw.moec_plan_save_sync(self.raw, data, handle)
        return bytes(data)

    def restore(self, data: bytes, *, stream: Any = None) -> Self:
        """Restore bit for bit into a plan of an equal desc. Raises CorruptError, MismatchError."""
        _raw.moec_plan_restore_sync(self.raw, data, stream_handle(stream))
        return self._built()


def _move(
    context: Context, plan: Plan, call: str, stream: int, into: dict[str, Any], **given: Any
) -> None:
    """One of the four moves of rows: moec_<call>, from the arrays given `into` others."""
    args = getattr(_raw, f"moec_{call.replace('backward', 'grad')}_args")()
    args.plan = handle_of("plan", plan, Plan)
    keep: list[Any] = []
    set_tensors(args, keep, stream=stream, **given)
    set_tensors(args, keep, write=True, stream=stream, **into)
    getattr(_raw, f"moec_{call}")(context_of(context), args, stream)


def permute(
    context: Context,
    plan: Plan,
    x: Array,
    *,
    rows: Array | None = None,
    x_scale: Array | None = None,
    row_scale: Array | None = None,
    row_weight: Array | None = None,
    stream: Any = None,
) -> Array:
    """Rows [P,H] of x [T,H] in plan order; padding rows are zero.

    x_scale [T,S] travels into row_scale [P,S]; row_weight [P] f32 receives the routing weights, and
    rows whose weight is exactly 0 are then zero.
    """
    require(x=x)
    if rows is None:
        rows = empty((plan.num_rows, x.shape[-1]), x, x)
    into = {"rows": rows, "row_scale": row_scale, "row_weight": row_weight}
    _move(context, plan, "permute", stream_handle(stream), into, x=x, x_scale=x_scale)
    return rows


def unpermute(
    context: Context,
    plan: Plan,
    rows: Array,
    *,
    num_tokens: int,
    routing_weights: Array | None = None,
    residual: Array | None = None,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """y [T,H]: sum of each token's rows [P,H] in slot order, in fp32, rounded once.

    routing_weights [T,K] f32 (absent: 1); residual [T,H] is added and may be `out` itself.
    """
    require(rows=rows)
    y = empty((num_tokens, rows.shape[-1]), rows, rows) if out is None else out
    given = {"rows": rows, "routing_weights": routing_weights, "residual": residual}
    _move(context, plan, "unpermute", stream_handle(stream), {"y": y}, **given)
    return y


def permute_backward(
    context: Context,
    plan: Plan,
    d_rows: Array,
    *,
    num_tokens: int,
    d_row_weight: Array | None = None,
    d_routing_weights: Array | None = None,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """d_x [T,H] from d_rows [P,H]; d_routing_weights [T,K] f32 from d_row_weight [P] f32."""
    require(d_rows=d_rows)
    d_x = empty((num_tokens, d_rows.shape[-1]), d_rows, d_rows) if out is None else out
    given = {"d_rows": d_rows, "d_row_weight": d_row_weight}
    into = {"d_x": d_x, "d_routing_weights": d_routing_weights}
    _move(context, plan, "permute_backward", stream_handle(stream), into, **given)
    return d_x


def unpermute_backward(
    context: Context,
    plan: Plan,
    d_y: Array,
    rows: Array,
    *,
    routing_weights: Array | None = None,
    d_routing_weights: Array | None = None,
    out: Array | None = None,
    stream: Any = None,
) -> Array:
    """d_rows [P,H] from d_y [T,H]; d_routing_weights [T,K] f32 needs the forward's rows [P,H]."""
    require(rows=rows)
    d_rows = empty(tuple(rows.shape), rows, rows) if out is None else out
    given = {"d_y": d_y, "rows": rows, "routing_weights": routing_weights}
    into = {"d_rows": d_rows, "d_routing_weights": d_routing_weights}
    _move(context, plan, "unpermute_backward", stream_handle(stream), into, **given)
    return d_rows
