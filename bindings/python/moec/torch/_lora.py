# SPDX-License-Identifier: Apache-2.0
"""Adapters of a module of experts: low-rank terms beside its frozen matrices, by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from .._enums import GateLayout, Orientation
from .._spec import Spec
from . import _adapted
from ._codes import CodedModule

MATRICES = ("gate_up", "gate", "up", "down")
"""where a module can have factors"""


def extents(spec: Spec, matrix: str) -> tuple[int, int]:
    """(in, out) of a matrix."""
    hidden, inter = spec.experts.hidden, spec.experts.inter
    if matrix == "down":
        return inter, hidden
    return hidden, 2 * inter if matrix == "gate_up" else inter


def matrices_of(spec: Spec) -> tuple[str, ...]:
    """The matrices that a module has, whose terms adapters can add to."""
    first = {GateLayout.SPLIT: ("gate", "up"), GateLayout.NONE: ("up",)}
    return (*first.get(spec.gate_layout, ("gate_up",)), "down")


class Factor(nn.Module):
    """The term of an adapter at one matrix: scale * (x a^T) b^T.

    a [E,r,in], b [E,out,r]; they begin as PEFT's do: a uniform as of nn.Linear, b 0."""

    a: nn.Parameter
    b: nn.Parameter

    def __init__(self, a: Tensor, b: Tensor, alpha: float, rslora: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)
        self.alpha, self.rslora = alpha, rslora

    @property
    def rank(self) -> int:
        return int(self.a.shape[1])

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale:.4g}"


class Adapter(nn.ModuleDict):
    """Factors by the name of their matrix."""


class AdaptedModule(CodedModule):
    """What modules of experts do with adapters, where they have any."""

    _spec: Spec
    adapters: nn.ModuleDict
    active_adapters: tuple[str, ...] = ()
    _adapter_text = ""

    def add_adapter(
        self, name: str, rank: int, *, alpha: float | None = None, rslora: bool = False,
        matrices: Iterable[str] | None = None, dtype: torch.dtype | None = None,
    ) -> Self:
        """A new adapter with factors as Parameters, beside the routed experts, which are frozen:
        their matrices need no gradient from now on. It is active, beside those that are.

        alpha     scale is alpha / rank, with rslora alpha / sqrt(rank); None: alpha is rank
        matrices  of gate_up, or gate and up, and down; None: all that the module has
        dtype     of the factors; None: of the biases or plain matrices, of codes: ExpertsDesc's
        """
        own = matrices_of(self._spec)
        chosen = own if matrices is None else tuple(matrices)
        for matrix in chosen:
            if matrix not in own:
                raise ValueError(f"moec.torch: matrices has {matrix!r}; {', '.join(own)} exist")
        if not chosen:
            raise ValueError(f"moec.torch: matrices is empty; some of {', '.join(own)} are needed")
        if rank < 1:
            raise ValueError(f"moec.torch: rank is {rank}; at least 1 is needed")
        count, device = self._spec.experts.num_experts, self._device()
        options: dict[str, Any] = {"dtype": dtype or self._dtype(), "device": device}
        made: dict[str, Factor] = {}
        for matrix in chosen:
            inner, outer = extents(self._spec, matrix)
            a, b = torch.empty((count, rank, inner), **options), torch.zeros(
                (count, outer, rank), **options)
            nn.init.uniform_(a, -1 / math.sqrt(inner), 1 / math.sqrt(inner))
            made[matrix] = Factor(a, b, rank if alpha is None else alpha, rslora)
        return self._enter(name, made)

    def _enter(self, name: str, factors: Mapping[str, Factor]) -> Self:
        if getattr(self, "ep", None) is not None:
            raise NotImplementedError(
                "moec.torch: adapters of a module with an ep; moec.Layer takes both")
        if "." in name or not name:
            raise ValueError(f"moec.torch: an adapter's name is {name!r}; text without a dot is")
        if "adapters" not in self._modules:
            self.adapters = nn.ModuleDict()
        if name in self.adapters:
            raise ValueError(f"moec.torch: there is an adapter {name!r}; delete_adapter() ends it")
        for parameter in self._routed().values():
            parameter.requires_grad_(False)
        self.adapters[name] = Adapter(factors)
        self.set_adapters(*self.active_adapters, name)
        return self

    def set_adapters(self, *names: str) -> Self:
        """Those that calls add up; none: the experts alone. requires_grad stays as it is."""
        held = self._modules.get("adapters") or ()
        for name in names:
            if name not in held:
                raise ValueError(f"moec.torch: no adapter {name!r}; the module has "
                                 f"{', '.join(held) or 'none'}")
        self.active_adapters = tuple(dict.fromkeys(names))
        terms = [_adapted.Term(index, matrix, factor.scale)
                 for index, matrix, factor in self._terms()]
        self._adapter_text = _adapted.text_of(self._spec.gate_layout, terms) if terms else ""
        return self

    def delete_adapter(self, name: str) -> Self:
        """Without it; the experts stay frozen."""
        self.set_adapters(*(held for held in self.active_adapters if held != name))
        if name not in (self._modules.get("adapters") or ()):
            raise ValueError(f"moec.torch: no adapter {name!r} to delete")
        del self.adapters[name]
        return self

    def _terms(self) -> list[tuple[int, str, Factor]]:
        """(place in the call, matrix, factor) of all active terms."""
        return [(index, matrix, factor) for index, name in enumerate(self.active_adapters)
                for matrix, factor in self.adapters[name].items()]  # type: ignore[operator]

    def _factors(self) -> Sequence[Tensor]:
        """The active factors in the order of the text."""
        return [part for *_, factor in self._terms() for part in (factor.a, factor.b)]

    def _routed(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def _device(self) -> torch.device:
        return next(self.parameters()).device

    def _dtype(self) -> torch.dtype:
        raise NotImplementedError


def is_in_out(spec: Spec, matrix: str) -> bool:
    """Whether a matrix is stored [in,out]."""
    held = spec.down_orientation if matrix == "down" else spec.gate_up_orientation
    return held == Orientation.IN_OUT
