# SPDX-License-Identifier: Apache-2.0
"""Adapters of an operator's call: the factors are tensors, the rest is text, as in _spec.

Factors of a call are a and b of each term in turn. They are read where they lie, whatever their
strides, in any type of floats.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from .. import _raw
from .._adapters import Adapter, Adapters, Factors, raw_adapters
from .._context import Context
from .._descriptors import AdaptersDesc, ExpertsDesc
from .._enums import GateLayout
from ._structs import Frame, offset_of

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
        self.adapters = Adapters(context, sizes, self._adapters(factors))
        self.adapters.held, self.adapters._keep = (), []
        self._frames: dict[tuple[bool, ...], Frame] = {}

    def _adapters(self, factors: Sequence[Tensor | None]) -> list[Adapter]:
        made = [Adapter() for _ in range(1 + max(term.adapter for term in self._terms))]
        held = [None if tensor is None else tensor.detach() for tensor in factors]
        for term, a, b in zip(self._terms, held[::2], held[1::2], strict=True):
            setattr(made[term.adapter], term.place, _factors(term, a, b, self._count))
        return made

    def gradients(self, factors: Sequence[Tensor | None], wanted: Sequence[Tensor]) -> Any:
        """moec_adapter structs of the wanted gradients, which are those that are not None. They are
        as empty_like() makes them of factors: only their addresses differ from call to call."""
        there = tuple([tensor is not None for tensor in factors])
        frame = self._frames.get(there)
        if frame is None:
            frame = self._frames[there] = self._frame(factors)
        return frame.fill({}, map(Tensor.data_ptr, wanted))

    def _frame(self, factors: Sequence[Tensor | None]) -> Frame:
        keep: list[Any] = []
        adapters = self._adapters(factors)
        for term in self._terms:
            getattr(adapters[term.adapter], term.place).scale = 0.0
        raw, size = raw_adapters(adapters, keep, "d_adapters"), _raw.adapter_bytes
        at = [term.adapter * size + offset_of("moec_adapter", term.place, field)
              for term in self._terms for field in _FIELDS[term.storage]]
        pattern = ctypes.string_at(int(raw.this), size * len(adapters))
        return Frame(pattern, (), tuple(
            place for place, tensor in zip(at, factors, strict=True) if tensor is not None))
