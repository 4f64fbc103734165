# SPDX-License-Identifier: Apache-2.0
"""A call past torch's dispatcher, where nobody listens there. The operators of _ops have some 25
arguments, for which the wrappers of a custom operator take longer than all the rest of a call."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from ._engine import ep_of
from ._structs import DEVICES

_KINDS = frozenset((Tensor, nn.Parameter))
_functorch: Any = torch._C._functorch
_is_tracing: Any = torch._C._is_tracing
_num_modes: Any = torch._C._len_torch_dispatch_stack
_has_storage: Any = torch._C._has_storage  # what vmap gives has none


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
    devices = {tensor.device for tensor in tensors}
    return len(devices) == 1 and devices.pop().type in DEVICES


class Moec(torch.autograd.Function):
    """An operator's outputs without the last, which is kept; and its gradients."""

    @staticmethod
    def forward(
        ctx: Any, kind: Any, names: tuple[str, ...], main_grads: list[Tensor],
        settings: tuple[Any, ...], *values: Tensor,
    ) -> tuple[Tensor, ...]:
        given = dict(zip(names, values, strict=True))
        (*outputs, saved), ctx.before = kind.compute(given, settings)
        ctx.kind, ctx.names, ctx.settings = kind, names, settings
        ctx.ep = ep_of(settings[0])
        # Not saved for backward: the next micro batch adds to them before this one's backward.
        ctx.main_grads = main_grads
        ctx.save_for_backward(saved, *values)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[2:])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Any, ...]:
        saved, *values = ctx.saved_tensors
        no_gradient = (None,) * (len(ctx.needs_input_grad) - len(values))
        needs = [n for n, need in zip(ctx.names, ctx.needs_input_grad[len(no_gradient):],
                                      strict=True) if need]
        given = dict(zip(ctx.names, values, strict=True))
        found = ctx.kind.gradients(given, needs, ctx.main_grads, saved, d_outputs, ctx.settings,
                                   ctx.before)
        return (*no_gradient, *(found.get(name) for name in ctx.names))
