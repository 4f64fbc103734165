# SPDX-License-Identifier: Apache-2.0
"""Adapters of an operator's call: the factors are tensors, the rest is text, as in _spec.

Factors of a call are named factor.0, factor.1, ...: a and b of each term in turn. They are read
where they lie, whatever their strides, in any type of floats.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _raw
from .._adapters import Adapter, Adapters, Factors
from .._context import Context
from .._descriptors import AdaptersDesc, ExpertsDesc
from .._enums import GateLayout
from ._structs import Form, offset_of, put_at

_core = _raw._core
NAMES = tuple(f"factor.{i}" for i in range(2048))  # of the 256 adapters that a call can have
FACTORS = frozenset(NAMES)
STACKS, PEFT, PEFT_EXCHANGED = range(3)
"""How a term's factors are stored: a [E,r,in] and b [E,out,r]; PEFT's lora_A [E r,in] and
lora_B [out,r E]; the same where lora_A is beside the output"""


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


def _form(term: Term, part: int, tensor: Tensor, count: int) -> Form:
    """The view [E,r,in] or [E,out,r] of a term's tensor: its first or its second."""
    if term.storage == STACKS:
        return tensor.shape, tensor.stride()
    if tensor.dim() != 2 or tensor.shape[part] % count or not tensor.shape[part]:
        raise ValueError(
            f"moec.torch: {('lora_A', 'lora_B')[part]} of {term.place} has the shape "
            f"{list(tensor.shape)}; lora_A [E r,in] and lora_B [out,r E] of {count} experts are "
            "needed"
        )
    (rows, columns), (down, right) = tensor.shape, tensor.stride()
    rank = tensor.shape[part] // count
    e, y, x = ((count, rank * down), (rank, down), (columns, right)) if part == 0 else (
        (count, right), (rows, down), (rank, count * right))
    shape, strides = zip(e, *((y, x) if term.storage == PEFT else (x, y)), strict=True)
    return shape, strides


def _is_a(term: Term, part: int) -> bool:
    return (part == 0) != (term.storage == PEFT_EXCHANGED)


def bind(context: Context, desc: ExpertsDesc, text: str, factors: Sequence[Tensor]) -> Adapters:
    """Adapters bound to tensors, which are not kept alive."""
    layout, terms = _parse(text)
    sizes = AdaptersDesc(num_experts=desc.num_experts, hidden=desc.hidden, inter=desc.inter,
                         gate_layout=layout)
    adapters = [Adapter() for _ in range(1 + max(term.adapter for term in terms))]
    for term, *both in zip(terms, factors[::2], factors[1::2], strict=True):
        held = Factors(scale=term.scale)
        for part, tensor in enumerate(both):
            form = _form(term, part, tensor, desc.num_experts)
            setattr(held, "a" if _is_a(term, part) else "b", tensor.detach().as_strided(*form))
        setattr(adapters[term.adapter], term.place, held)
    made = Adapters(context, sizes, adapters)
    made.held, made._keep = (), []
    return made


class _Place(NamedTuple):
    """A factor's gradient in an array of moec_adapter."""

    name: str
    offset: int
    term: Term
    part: int


@lru_cache(maxsize=1024)
def _places(text: str) -> tuple[int, tuple[_Place, ...]]:
    """How many adapters a text has, and where its factors stand in an array of them."""
    terms = _parse(text)[1]
    found = [
        _Place(NAMES[2 * i + part], term.adapter * _raw.adapter_bytes + offset_of(
            "moec_adapter", term.place, "a" if _is_a(term, part) else "b"), term, part)
        for i, term in enumerate(terms) for part in (0, 1)
    ]
    return 1 + max(term.adapter for term in terms), tuple(found)


def raw_gradients(text: str, gradients: Mapping[str, Tensor], count: int, keep: list[Any]) -> Any:
    """moec_adapter structs of the gradients that are given by name, of `count` experts."""
    number, places = _places(text)
    items = _core.new_adapter_array(number)
    keep.append(items)
    given = [place for place in places if place.name in gradients]
    tensors = [gradients[place.name] for place in given]
    forms = [_form(place.term, place.part, tensor, count)
             for place, tensor in zip(given, tensors, strict=True)]
    put_at(int(items), [place.offset for place in given], tensors, [p.name for p in given], forms)
    return _core.adapter_array_cast(items)
