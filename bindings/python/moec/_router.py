# SPDX-License-Identifier: Apache-2.0
"""The router: x -> logits -> expert ids and routing weights, and back."""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

from . import _raw
from ._arguments import inputs_of
from ._context import Context, context_of
from ._descriptors import RouterDesc, to_raw
from ._enums import DType, GradFlags
from ._fields import GateInputs, RouteInputs
from ._handle import Handle
from ._tensors import Array, empty, require, set_tensors, stream_handle, tensor


class Routing(NamedTuple):
    """What route() returns."""

    expert_ids: Array
    """[T,K] i32; -1 = none"""
    routing_weights: Array
    """[T,K] f32; 0 where the id is -1"""


class Router(Handle):
    """An immutable router. Raises UnsupportedError for what is legal but not implemented."""

    _free = _raw._core.moec_router_free

    def __init__(self, context: Context, desc: RouterDesc) -> None:
        self.desc = desc
        raw = to_raw(desc, _raw.moec_router_desc)
        self._pointer = _raw.moec_router_create(context_of(context), raw)

    @property
    def num_ids(self) -> int:
        """E+Z, the number of logits per token."""
        return self.desc.num_experts + self.desc.num_zero_experts

    def gate(
        self,
        x: Array,
        weight: Array,
        *,
        rng_offset: int = 0,
        out: Array | None = None,
        x_jittered: Array | None = None,
        stream: Any = None,
        **others: Unpack[GateInputs],
    ) -> Array:
        """Logits [T,E+Z] f32 of x [T,H] and weight [E+Z,H], both f32, bf16 or f16.

        others: bias [E+Z] with RouterFlags.LOGIT_BIAS; input_scale [H] with RouterInput.RMS_SCALED.
        x_jittered [T,H] receives the jittered input. Raises ShapeError, DTypeError.
        """
        require(x=x)
        keep: list[Any] = []
        handle = stream_handle(stream)
        logits = empty((x.shape[0], self.num_ids), DType.F32, x) if out is None else out
        args = _raw.moec_gate_args()
        args.rng_offset = rng_offset
        given = {"x": x, "weight": weight, **others}
        set_tensors(args, keep, stream=handle, **inputs_of("Router.gate", "moec_gate_args", given))
        set_tensors(args, keep, write=True, stream=handle, logits=logits, x_jittered=x_jittered)
        _raw.moec_gate_forward(self.raw, args, handle)
        return logits

    def gate_backward(
        self,
        x: Array,
        weight: Array,
        d_logits: Array,
        *,
        d_x_jittered: Array | None = None,
        input_scale: Array | None = None,
        rng_offset: int = 0,
        flags: GradFlags = GradFlags.NONE,
        d_x: Array | None = None,
        d_weight: Array | None = None,
        d_bias: Array | None = None,
        d_input_scale: Array | None = None,
        stream: Any = None,
    ) -> None:
        """Gradients of gate() into the given arrays (shapes of their inputs); None is skipped.

        d_x_jittered [T,H] is an input: the gradient of gate()'s x_jittered, which d_x includes.
        GradFlags.SKIP_IDLE: x of a masked token, whose d_logits are 0, may be NaN (on CUDA that
        takes a copy of x).
        """
        keep: list[Any] = []
        handle = stream_handle(stream)
        args = _raw.moec_gate_grad_args()
        args.flags = flags
        args.rng_offset = rng_offset
        set_tensors(args, keep, stream=handle, x=x, weight=weight, d_logits=d_logits,
                    input_scale=input_scale, d_x_jittered=d_x_jittered)
        set_tensors(args, keep, write=True, stream=handle, d_x=d_x, d_weight=d_weight,
                    d_bias=d_bias, d_input_scale=d_input_scale)
        _raw.moec_gate_backward(self.raw, args, handle)

    def route(
        self,
        logits: Array,
        *,
        scores: Array | None = None,
        counts: Array | None = None,
        out: Routing | None = None,
        stream: Any = None,
        **others: Unpack[RouteInputs],
    ) -> Routing:
        """Ids and weights of logits [T,E+Z] (f32, bf16 or f16).

        others: select_bias [E+Z] f32, per_expert_scale [E+Z], token_mask [T] u8 or bool (0: routed
        nowhere), table [V,K] and token_ids [T] (Select.TABLE), given_ids [T,K] (Select.GIVEN).
        scores [T,E+Z] f32 is written when given; counts [E+Z] i32 (which
        saturates) or i64 is added to.
        """
        require(logits=logits)
        keep: list[Any] = []
        handle = stream_handle(stream)
        if out is None:
            shape = (logits.shape[0], self.desc.top_k)
            out = Routing(empty(shape, DType.I32, logits), empty(shape, DType.F32, logits))
        args = _raw.moec_route_args()
        inputs = inputs_of("Router.route", "moec_route_args", {"logits": logits, **others})
        set_tensors(args, keep, stream=handle, **inputs)
        set_tensors(args, keep, write=True, stream=handle, expert_ids=out.expert_ids,
                    routing_weights=out.routing_weights, scores=scores, counts=counts)
        _raw.moec_route_forward(self.raw, args, handle)
        return out

    def route_backward(
        self,
        logits: Array,
        expert_ids: Array,
        d_routing_weights: Array,
        *,
        per_expert_scale: Array | None = None,
        d_logits_in: Array | None = None,
        flags: GradFlags = GradFlags.NONE,
        d_per_expert_scale: Array | None = None,
        out: Array | None = None,
        stream: Any = None,
    ) -> Array:
        """d_logits [T,E+Z] f32 from d_routing_weights [T,K] f32, plus d_logits_in [T,E+Z]."""
        require(logits=logits)
        keep: list[Any] = []
        handle = stream_handle(stream)
        d_logits = empty((logits.shape[0], self.num_ids), DType.F32, logits) if out is None else out
        args = _raw.moec_route_grad_args()
        args.flags = flags
        set_tensors(args, keep, stream=handle, logits=logits, expert_ids=expert_ids,
                    d_routing_weights=d_routing_weights, per_expert_scale=per_expert_scale,
                    d_logits_in=d_logits_in)
        set_tensors(args, keep, write=True, stream=handle, d_logits=d_logits,
                    d_per_expert_scale=d_per_expert_scale)
        _raw.moec_route_backward(self.raw, args, handle)
        return d_logits

    def update_bias(
        self, counts: Array, bias: Array, *, rate: float, stream: Any = None
    ) -> None:
        """bias[e] += rate * sign(mean(counts) - counts[e]).

        counts [E+Z] i32 or i64, bias [E+Z] f32.
        """
        keep: list[Any] = []
        handle = stream_handle(stream)
        raw_counts = tensor(counts, keep, "counts", stream=handle)
        raw_bias = tensor(bias, keep, "bias", write=True, stream=handle)
        _raw.moec_router_bias_update(self.raw, raw_counts, rate, raw_bias, handle)
