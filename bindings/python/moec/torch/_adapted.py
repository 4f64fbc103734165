# SPDX-License-Identifier: Apache-2.0
"""Adapters of an operator's call: the factors are tensors, the rest is text, as in _spec.

Factors of a call are named factor.0, factor.1, ...: a and b of each term in turn. They are read
where they lie, whatever their strides, in any type of floats.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _raw
from .._adapters import Adapter, Adapters, Factors, raw_adapters
from .._context import Context
from .._descriptors import AdaptersDesc, ExpertsDesc
from .._enums import GateLayout
from ._structs import Frame, offset_of

NAMES = tuple(f"factor.{i}" for i in range(2048))  # of the 256 adapters that a call can have
FACTORS = frozenset(NAMES)
STACKS, PEFT, PEFT_EXCHANGED = range(3)
"""How a term's factors are stored: a [E,r,in] and b [E,out,r]; PEFT's lora_A [E r,in] and
lora_B [out,r E]; the same where lora_A is beside the output"""
_FIELDS = {STACKS: "ab", PEFT: "ab", PEFT_EXCHANGED: "ba"}


class Term(NamedTuple):
    """What one adapter adds at one matrix: scale * (x A^T) B^T."""

    adapter: int
    place: str
    """a field of moec.Adapter"""
    scale: float
    storage: int = STACKS


def text_of(layout: GateLayout, terms: Iterable[Term]) -> str:
    """The text of a call's terms; layout is that of gate_up's rows."""
    return _text(int(layout), tuple(terms))


@lru_cache(maxsize=1024)
def _text(layout: int, terms: tuple[Term, ...]) -> str:
    return json.dumps([layout, *terms], separators=(",", ":"))


@lru_cache(maxsize=1024)
def _parse(text: str) -> tuple[GateLayout, tuple[Term, ...]]:
    layout, *terms = json.loads(text)
    return GateLayout(layout), tuple(Term(*term) for term in terms)


def named(factors: Sequence[Any]) -> dict[str, Any]:
    """Factors in order by their names, without those that are None."""
    if len(factors) > len(NAMES):
        raise ValueError(f"moec.torch: {len(factors)} factors; a call has at most {len(NAMES)}")
    return {name: t for name, t in zip(NAMES, factors, strict=False) if t is not None}


def in_order(given: Mapping[str, Any], count: int) -> list[Any]:
    """Factors by name in order, None where absent."""
    return [given.get(name) for name in NAMES[:count]]


def empty_gradient(factor: Tensor) -> Tensor:
    """Memory for a factor's gradient; PEFT's storage keeps its strides."""
    return torch.empty_like(factor)


def _factors(term: Term, first: Tensor | None, second: Tensor | None, count: int) -> Factors:
    """A term's tensors as the library has them."""
    if term.storage == STACKS:
        return Factors(a=first, b=second, scale=term.scale)
    try:
        return Factors.from_peft(first, second, count, term.scale,
                                 exchanged=term.storage == PEFT_EXCHANGED)
    except ValueError as error:
        said = str(error).removeprefix("moec.Factors.from_peft: ")
        raise ValueError(f"moec.torch: {term.place} of an adapter: {said}") from None


class Bound:
    """Adapters bound to tensors, which are not kept alive."""

    def __init__(
        self, context: Context, desc: ExpertsDesc, text: str, factors: Sequence[Tensor]
    ) -> None:
        layout, self._terms = _parse(text)
        self._count = desc.num_experts
        sizes = AdaptersDesc(num_experts=desc.num_experts, hidden=desc.hidden, inter=desc.inter,
                             gate_layout=layout)
        self.adapters = Adapters(context, sizes, self._adapters(named(factors)))
        self.adapters.held, self.adapters._keep = (), []
        self._frames: dict[tuple[str, ...], Frame] = {}

    def _adapters(self, tensors: Mapping[str, Tensor]) -> list[Adapter]:
        made = [Adapter() for _ in range(1 + max(term.adapter for term in self._terms))]
        held = {name: tensor.detach() for name, tensor in tensors.items()}
        for term, *names in zip(self._terms, NAMES[::2], NAMES[1::2], strict=False):
            both = (held.get(name) for name in names)
            setattr(made[term.adapter], term.place, _factors(term, *both, self._count))
        return made

    def gradients(self, given: Mapping[str, Tensor]) -> Any:
        """moec_adapter structs of gradients by name, which are as empty_gradient() makes them: only
        their addresses differ from call to call."""
        names = tuple(given)
        frame = self._frames.get(names)
        if frame is None:
            frame = self._frames[names] = self._frame(given)
        return frame.fill({}, [tensor.data_ptr() for tensor in given.values()])

    def _frame(self, given: Mapping[str, Tensor]) -> Frame:
        keep: list[Any] = []
        adapters = self._adapters(given)
        for term in self._terms:
            getattr(adapters[term.adapter], term.place).scale = 0.0
        raw, size = raw_adapters(adapters, keep, "d_adapters"), _raw.adapter_bytes
        at = {name: term.adapter * size + offset_of("moec_adapter", term.place, field)
              for i, term in enumerate(self._terms)
              for name, field in zip(NAMES[2 * i : 2 * i + 2], _FIELDS[term.storage], strict=True)}
        pattern = ctypes.string_at(int(raw.this), size * len(adapters))
        return Frame(pattern, (), tuple(at[name] for name in given))
