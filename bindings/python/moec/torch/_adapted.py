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

from .._adapters import Adapter, Adapters, Factors, raw_adapters
from .._context import Context
from .._descriptors import AdaptersDesc, ExpertsDesc
from .._enums import GateLayout

_PREFIX = "factor."


class Term(NamedTuple):
    """What one adapter adds at one matrix: scale * (x A^T) B^T."""

    adapter: int
    place: str
    """a field of moec.Adapter"""
    scale: float


def text_of(layout: GateLayout, terms: Iterable[Term]) -> str:
    """The text of a call's terms; layout is that of gate_up's rows."""
    return json.dumps([int(layout), *terms], separators=(",", ":"))


@lru_cache(maxsize=1024)
def _parse(text: str) -> tuple[GateLayout, tuple[Term, ...]]:
    layout, *terms = json.loads(text)
    return GateLayout(layout), tuple(Term(*term) for term in terms)


def is_factor(name: str) -> bool:
    return name.startswith(_PREFIX)


def named(factors: Sequence[Any]) -> dict[str, Any]:
    """Factors in order by their names, without those that are None."""
    return {f"{_PREFIX}{i}": t for i, t in enumerate(factors) if t is not None}


def in_order(given: Mapping[str, Any], count: int) -> list[Any]:
    """Factors by name in order, None where absent."""
    return [given.get(f"{_PREFIX}{i}") for i in range(count)]


def empty_gradient(factor: Tensor) -> Tensor:
    """Memory for a factor's gradient; PEFT's storage keeps its strides."""
    return torch.empty_like(factor)


def _adapters(terms: Sequence[Term], factors: Sequence[Any], is_gradient: bool) -> list[Adapter]:
    made = [Adapter() for _ in range(1 + max(term.adapter for term in terms))]
    for term, a, b in zip(terms, factors[::2], factors[1::2], strict=True):
        held = Factors(a=a, b=b, scale=0 if is_gradient else term.scale)
        if a is not None or b is not None:
            setattr(made[term.adapter], term.place, held)
    return made


def bind(context: Context, desc: ExpertsDesc, text: str, factors: Sequence[Tensor]) -> Adapters:
    """Adapters bound to tensors, which are not kept alive."""
    layout, terms = _parse(text)
    sizes = AdaptersDesc(num_experts=desc.num_experts, hidden=desc.hidden, inter=desc.inter,
                         gate_layout=layout)
    made = Adapters(context, sizes, _adapters(terms, [t.detach() for t in factors], False))
    made.held, made._keep = (), []
    return made


def raw_gradients(
    text: str, gradients: Mapping[str, Tensor], count: int, keep: list[Any], stream: int
) -> Any:
    """moec_adapter structs of the gradients that are given by name."""
    given = _adapters(_parse(text)[1], in_order(gradients, count), True)
    return raw_adapters(given, keep, "d_adapters", write=True, stream=stream)
