# SPDX-License-Identifier: Apache-2.0
"""What a framework's operator is about, apart from its tensors: descriptors and layouts as text.

A framework's graph carries text where it cannot carry an object; equal texts are equal operators.
Which tensors an operator has, in which order, is said here once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ._descriptors import Activation, ExpertsDesc, RouterDesc
from ._enums import ExpertsDescFlags, GateLayout, Orientation
from ._fields import GRADIENTS, INPUTS
from ._weights import WEIGHTS

_LAYER, _EXPERTS = INPUTS["moec_layer_args"], INPUTS["moec_experts_args"]
_GRADIENTS = GRADIENTS["moec_layer_grad_args"]
_COUNTS = {"num_experts": 0, "top_k": 0}
_SIZES = {"hidden": 0, "inter": 0} | _COUNTS

ROUTED_WEIGHTS = tuple(f"expert_{n}" if n in _LAYER else n for n in WEIGHTS)
"""names of WeightSet's fields among an operator's inputs, where gate_bias is the router's"""
SHARED_WEIGHTS = tuple(f"shared_expert_{name}" for name in WEIGHTS)
_AROUND = tuple(name for name in _EXPERTS if name not in ("x", "residual"))
_ROUTER = tuple(name for name in _LAYER if name not in _EXPERTS and name in _GRADIENTS)
_ROUTER_DATA = tuple(name for name in _LAYER if name not in _EXPERTS and name not in _GRADIENTS)
EXPERTS_INPUTS = ("x", "expert_ids", "routing_weights", *ROUTED_WEIGHTS, *SHARED_WEIGHTS, *_AROUND)
LAYER_INPUTS = ("x", *_ROUTER, *_ROUTER_DATA, *ROUTED_WEIGHTS, *SHARED_WEIGHTS, *_AROUND)
REQUIRED = frozenset(("x", "expert_ids", "routing_weights"))
"""what an operator cannot do without, where it is among its inputs"""
WITHOUT_GRADIENT = frozenset((*_ROUTER_DATA, "expert_ids"))


@lru_cache
def build_of(package: Path) -> str:
    """What a compiled graph holds of a package besides texts: sizes of results come from its
    libraries, gradients from its modules. torch keeps such graphs on disk by their texts."""
    digest = hashlib.sha256()
    for pattern in ("*.py", "torch/*.py", "lib/*.so*"):
        for path in sorted(package.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Experts, or a whole layer when there is a router. The element type is that of x."""

    experts: ExpertsDesc
    router: RouterDesc | None = None
    gate_up_orientation: Orientation = Orientation.OUT_IN
    down_orientation: Orientation = Orientation.OUT_IN
    gate_layout: GateLayout = GateLayout.GATE_THEN_UP
    shared_gate_layout: GateLayout = GateLayout.SPLIT
    ep: int = 0
    """number of the ep that a layer's experts are parted by"""

    @property
    def inputs(self) -> tuple[str, ...]:
        return EXPERTS_INPUTS if self.router is None else LAYER_INPUTS

    @staticmethod
    def of(
        experts: ExpertsDesc, router: RouterDesc | None, gate_layout: GateLayout,
        gate_up: Orientation, down: Orientation, shared: GateLayout, *, plain: bool,
    ) -> Spec:
        """A spec whose layouts all agree on whether the experts have a gate. plain: its weights
        have no codes."""
        if GateLayout.NONE in (gate_layout, experts.gate_layout):
            gate_layout = shared = inner = GateLayout.NONE
        else:
            inner = GateLayout.SPLIT
        flags = experts.flags | ExpertsDescFlags.PLAIN_WEIGHTS if plain else experts.flags
        return Spec(
            experts=dataclasses.replace(experts, gate_layout=inner, flags=flags), router=router,
            gate_up_orientation=gate_up, down_orientation=down, gate_layout=gate_layout,
            shared_gate_layout=shared,
        )

    def text(self) -> str:
        """JSON without the fields that are zero, or that each call decides: dtype and save; and
        with the build, so that what is kept for a text is not taken for another build."""
        plain = dataclasses.asdict(self) | {"build": build_of(Path(__file__).parent)}
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
    names = ("gate_up_orientation", "down_orientation", "gate_layout", "shared_gate_layout", "ep")
    return {name: plain.get(name, 0) for name in names}
