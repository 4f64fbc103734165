# SPDX-License-Identifier: Apache-2.0
"""What a framework's operator is about, apart from its tensors: descriptors and layouts as text.

A framework's graph carries text where it cannot carry an object; equal texts are equal operators.
Which tensors an operator has, in which order, is said here once.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ._descriptors import Activation, ExpertsDesc, RouterDesc
from ._enums import GateLayout, Orientation

MATRICES = ("gate_up", "gate", "up", "down")
WEIGHTS = (*MATRICES, *(f"{name}_bias" for name in MATRICES))
"""fields of WeightSet"""
ROUTED_WEIGHTS = tuple({"gate_bias": "expert_gate_bias"}.get(n, n) for n in WEIGHTS)
"""their names among an operator's inputs, where gate_bias is the router's"""
SHARED_WEIGHTS = tuple(f"shared_expert_{name}" for name in WEIGHTS)
_COUNTS = {"num_experts": 0, "top_k": 0}
_SIZES = {"hidden": 0, "inter": 0} | _COUNTS
_AROUND = ("shared_gate", "shared_gate_bias", "output_bias")
EXPERTS_INPUTS = ("x", "expert_ids", "routing_weights", *ROUTED_WEIGHTS, *SHARED_WEIGHTS, *_AROUND)
_ROUTER = ("gate_weight", "gate_bias", "input_scale", "per_expert_scale")
_ROUTER_DATA = ("select_bias", "token_mask", "table", "token_ids", "given_ids")
LAYER_INPUTS = (
    "x", "router_x", *_ROUTER, *_ROUTER_DATA, *ROUTED_WEIGHTS, *SHARED_WEIGHTS, *_AROUND
)
WITHOUT_GRADIENT = frozenset((*_ROUTER_DATA, "expert_ids"))


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Experts, or a whole layer when there is a router. The element type is that of x."""

    experts: ExpertsDesc
    router: RouterDesc | None = None
    gate_up_orientation: Orientation = Orientation.OUT_IN
    down_orientation: Orientation = Orientation.OUT_IN
    gate_layout: GateLayout = GateLayout.GATE_THEN_UP
    shared_gate_layout: GateLayout = GateLayout.SPLIT

    @property
    def inputs(self) -> tuple[str, ...]:
        return EXPERTS_INPUTS if self.router is None else LAYER_INPUTS

    @staticmethod
    def of(
        experts: ExpertsDesc, router: RouterDesc | None, gate_layout: GateLayout,
        gate_up: Orientation, down: Orientation, shared: GateLayout,
    ) -> Spec:
        """A spec whose layouts all agree on whether the experts have a gate."""
        if GateLayout.NONE in (gate_layout, experts.gate_layout):
            gate_layout = shared = inner = GateLayout.NONE
        else:
            inner = GateLayout.SPLIT
        return Spec(
            experts=dataclasses.replace(experts, gate_layout=inner), router=router,
            gate_up_orientation=gate_up, down_orientation=down, gate_layout=gate_layout,
            shared_gate_layout=shared,
        )

    def text(self) -> str:
        """JSON without the fields that are zero, or that each call decides: dtype and save."""
        plain = dataclasses.asdict(self)
        for name in ("dtype", "save"):
            del plain["experts"][name]
        return json.dumps(_without_zeros(plain), separators=(",", ":"))

    @staticmethod
    @lru_cache(maxsize=1024)
    def parse(text: str) -> Spec:
        plain = json.loads(text)
        experts = _SIZES | plain.pop("experts")
        for name in ("activation", "shared_activation"):
            experts[name] = Activation(**experts.get(name, {}))
        router = plain.pop("router", None)
        return Spec(
            experts=ExpertsDesc(**experts),
            router=None if router is None else RouterDesc(**_COUNTS | router),
            **_zeros(plain),
        )


def _without_zeros(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {name: _without_zeros(item) for name, item in value.items()}
        return {name: item for name, item in kept.items() if item not in (0, None, {})}
    return value if value is None or isinstance(value, str) else _number(value)


def _number(value: Any) -> int | float:
    """A number as JSON has it; enums, NumPy and the frameworks have scalars of their own."""
    try:
        return int(operator.index(value))
    except TypeError:
        return float(value)


def _zeros(plain: dict[str, Any]) -> dict[str, Any]:
    names = ("gate_up_orientation", "down_orientation", "gate_layout", "shared_gate_layout")
    return {name: plain.get(name, 0) for name in names}
