# SPDX-License-Identifier: Apache-2.0
"""A call past torch's dispatcher, where nobody listens there. The operators of _ops have some 25
arguments, for which the wrappers of a custom operator take longer than all the rest of a call."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ._structs import DEVICES

_KINDS = frozenset((Tensor, nn.Parameter))
_functorch: Any = torch._C._functorch
_is_tracing: Any = torch._C._is_tracing
_num_modes: Any = torch._C._len_torch_dispatch_stack
_has_storage: Any = torch._C._has_storage  # what vmap gives has none
_device_of = attrgetter("device")
_NUM_OTHERS = 4  # arguments of Moec.forward before its tensors
_NO_GRADIENT = (None,) * _NUM_OTHERS


def plain(tensors: Collection[Tensor]) -> bool:
    """Whether a call of these is what it seems: no trace, mode or transform sees it, and all are
    tensors of one CPU or GPU, not of a class of their own."""
    if (
        torch.compiler.is_compiling()
        or _is_tracing()
        or _num_modes() > 0
        or _functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    ):
        return False
    if not _KINDS.issuperset(map(type, tensors)) or not all(map(_has_storage, tensors)):
        return False
    devices = set(map(_device_of, tensors))
    return len(devices) == 1 and devices.pop().type in DEVICES


class Moec(torch.autograd.Function):
    """An operator's outputs without the last, which is kept; and its gradients. The values are
    inputs of these names, then factors."""

    @staticmethod
    def forward(
        ctx: Any, kind: Any, names: tuple[str, ...], main_grads: Sequence[Tensor],
        settings: tuple[Any, ...], *values: Tensor,
    ) -> tuple[Tensor, ...]:
        given = dict(zip(names, values, strict=False))
        (*outputs, saved), ctx.before = kind.compute(given, values[len(given):], settings)
        ctx.kind, ctx.names, ctx.settings = kind, names, settings
        # Not saved for backward: the next micro batch adds to them before this one's backward.
        ctx.main_grads = main_grads
        ctx.save_for_backward(saved, *values)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[2:])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Any, ...]:
        saved, *values = ctx.saved_tensors
        names, needs = ctx.names, ctx.needs_input_grad[_NUM_OTHERS:]
        count = len(names)
        wanted = [n for n, need in zip(names, needs, strict=False) if need], needs[count:]
        found, d_factors = ctx.kind.gradients(
            dict(zip(names, values, strict=False)), values[count:], wanted, ctx.main_grads, saved,
            d_outputs, ctx.settings, ctx.before)
        return (*_NO_GRADIENT, *map(found.get, names), *d_factors)
