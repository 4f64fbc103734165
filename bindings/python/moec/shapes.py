# SPDX-License-Identifier: Apache-2.0
"""Layer shapes of real models, from the one file that the C++ benchmarks read as well."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.resources import files
from typing import Any

DATA = files("moec") / "data"


@dataclass(frozen=True, slots=True)
class Shape:
    """One MoE layer: H hidden, I inter, E experts, Z zero_experts, K top_k, Is shared_inter."""

    name: str
    model_type: str
    published: str
    hidden: int
    inter: int
    experts: int
    zero_experts: int
    top_k: int
    shared_inter: int
    config: Mapping[str, Any] = field(default_factory=dict)
    """what config.json says beyond the sizes"""

    def flops(self, num_tokens: int, *, backward: bool, gated: bool) -> int:
        """Multiply-adds of the experts' GEMMs, times two; a backward costs twice a forward."""
        matrices = 3 if gated else 2
        width = self.top_k * self.inter + self.shared_inter
        forward = 2 * matrices * num_tokens * self.hidden * width
        return 3 * forward if backward else forward


def load() -> dict[str, Shape]:
    """All shapes by name."""
    entries = json.loads((DATA / "shapes.json").read_text())
    return {entry["name"]: Shape(**entry) for entry in entries}


def find(name: str) -> Shape:
    """A shape by its name or its published name. ValueError suggests the nearest name."""
    shapes = load()
    known = {key.lower(): shape for key, shape in shapes.items()}
    known |= {shape.published.lower(): shape for shape in shapes.values()}
    if name.lower() not in known:
        close = get_close_matches(name.lower(), known, 1, 0.5)
        hint = f"did you mean {known[close[0]].name}?" if close else f"one of {', '.join(shapes)}"
        raise ValueError(f"no model {name!r}; {hint}")
    return known[name.lower()]
