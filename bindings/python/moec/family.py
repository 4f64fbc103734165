# SPDX-License-Identifier: Apache-2.0
"""What a row of the families table is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ._enums import GateLayout, Orientation, Shared
from .config_defaults import DEFAULTS

_REQUIRED: Any = object()


class Key:
    """Value of the first of `names` in config.json; of a missing key the reference class's, else,
    and where it is null, `default`. `of` translates it."""

    def __init__(
        self, *names: str, default: Any = _REQUIRED, of: Mapping[Any, Any] | None = None
    ) -> None:
        self.names, self.default, self.of = names, default, of

    def read(self, config: Mapping[str, Any], layer: int) -> Any:
        reference = DEFAULTS.get(str(config.get("model_type")), {})
        known = config if any(name in config for name in self.names) else reference
        found = [known[name] for name in self.names if known.get(name) is not None]
        value = found[0] if found else self.default
        if value is _REQUIRED:
            raise ValueError(f"config: none of {', '.join(self.names)} is given")
        if isinstance(value, list):  # one value per layer
            value = value[layer] if layer < len(value) else 0
        if self.of is None:
            return value
        if value not in self.of:
            raise ValueError(
                f"config: {self.names[0]} is {value!r}; "
                f"{', '.join(map(repr, self.of))} are known"
            )
        return self.of[value]


@dataclass(frozen=True)
class Layout:
    """How the experts' matrices are stored: WeightSet field -> tensor name, with "{e}" for the
    expert where each has its own tensor."""

    names: dict[str, str]
    gate_layout: GateLayout = GateLayout.SPLIT
    gate_up_orientation: Orientation = Orientation.OUT_IN
    down_orientation: Orientation = Orientation.OUT_IN
    flat: bool = False
    """[E*N,K] instead of [E,N,K]"""


@dataclass(frozen=True, kw_only=True)
class Family:
    model_types: tuple[str, ...]
    block: str = "mlp"
    router: Mapping[str, Any] = field(default_factory=dict)
    experts: Mapping[str, Any] = field(default_factory=dict)
    activation: Mapping[str, Any] = field(default_factory=dict)
    shared_activation: Mapping[str, Any] | None = None
    """None: as activation"""
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    """tensors that some checkpoints of the family lack"""
    layouts: tuple[Layout, ...] = ()
    shared: Shared = Shared.NONE
    shared_layouts: tuple[Layout, ...] = ()
    shared_count: Key | None = None
    """when it reads above 0, a missing shared expert is an error"""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """config.json's keys for the columns of the shapes file, for `moec synth`"""
    prefix: str = "model.layers"
    strict: bool = True
    """every tensor of the block must have been understood"""

    @property
    def blocks(self) -> tuple[str, ...]:
        """The block's name in published checkpoints, and in transformers 5's memory."""
        return self.block, "mlp"
