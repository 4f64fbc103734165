# SPDX-License-Identifier: Apache-2.0
"""The MoE layers of a checkpoint by their full names, and the one that a user means.

A layer is its whole prefix ("model.layers.3"): the draft blocks of multi-token prediction
("mtp.layers.0") count from 0 again beside the model's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .checkpoint import CheckpointError
from .family import Family

_LAYER = re.compile(
    r"^(?P<layer>(?P<prefix>(?:.*\.)?(?:layers|blocks|blk|h|mtp|mtp_layers))\.(?P<number>\d+))"
    r"\.(?P<rest>.+)$"
)
_DRAFTS = ("mtp", "mtp_layers")
GOLDEN = "p"  # the name of a golden file's only layer


@dataclass(frozen=True, order=True)
class LayerName:
    prefix: str
    number: int
    full: str

    @property
    def parts(self) -> list[str]:
        return self.full.split(".")

    @property
    def is_draft(self) -> bool:
        return any(part in _DRAFTS for part in self.parts)

    @property
    def short(self) -> str:
        """As few parts as a user types: mtp.0, teacher.0, 3."""
        return ".".join(p for p in self.parts if p not in ("model", "layers", "blocks", "blk", "h"))

    def fits(self, wanted: str) -> bool:
        """The parts of `wanted` follow one another in the name, up to its number."""
        left = iter(self.parts)
        parts = wanted.split(".")
        return parts[-1] == self.parts[-1] and all(part in left for part in parts)


def find(tensors: Iterable[str], family: Family) -> list[LayerName]:
    """The layers that have a router of this family."""
    routers = family.tensors["gate_weight"]
    gates = {f"{block}.{name}".lstrip(".") for block in family.blocks for name in routers}
    found = set()
    for name in tensors:
        match = _LAYER.match(name)
        if match and match["rest"] in gates:
            found.add(LayerName(match["prefix"], int(match["number"]), match["layer"]))
        elif name.startswith(f"{GOLDEN}.") and name[2:] in routers:
            found.add(LayerName(GOLDEN, 0, GOLDEN))
    return sorted(found)


def own(layers: list[LayerName], family: Family) -> list[LayerName]:
    """The model's own layers: those under the table's prefix, else under the only other prefix that
    is no draft's. Two such prefixes are two models, which only a full name tells apart."""
    prefixes = {layer.prefix for layer in layers if not layer.is_draft}
    if family.prefix in prefixes:
        prefixes = {family.prefix}
    if len(prefixes) > 1:
        first = [next(x for x in layers if x.prefix == prefix) for prefix in sorted(prefixes)]
        raise CheckpointError(
            f"{' and '.join(layer.prefix for layer in first)} are the layers of several models; "
            f"name one, as in {' or '.join(layer.short for layer in first)}"
        )
    return [layer for layer in layers if layer.prefix in prefixes]


def choose(layers: list[LayerName], wanted: int | str | None, family: Family) -> LayerName:
    """The layer that is wanted: a number, a name, or None for the model's first."""
    if isinstance(wanted, str) and not wanted.isdecimal():
        named = ([layer for layer in layers if layer.full == wanted]
                 or [layer for layer in layers if layer.fits(wanted)])
        if len(named) == 1:
            return named[0]
        fits = f"fits {' and '.join(x.full for x in named)}" if named else "has no MoE block"
        raise CheckpointError(f"layer {wanted} {fits}; {describe(layers)} have")
    mine = own(layers, family)
    numbers = {layer.number: layer for layer in mine}
    number = min(numbers, default=0) if wanted is None else int(wanted)
    if number not in numbers:
        raise CheckpointError(f"layer {number} has no MoE block; {describe(layers)} have")
    return numbers[number]


def describe(layers: list[LayerName]) -> str:
    """Which layers have MoE blocks."""
    numbers: dict[str, list[int]] = {}
    for layer in layers:
        numbers.setdefault(layer.prefix, []).append(layer.number)
    texts = [f"{prefix} {n[0]} to {n[-1]} ({len(n)} of them)" for prefix, n in numbers.items()]
    return " and ".join(texts)
