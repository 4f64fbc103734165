# SPDX-License-Identifier: Apache-2.0
"""The matrices of a set of experts, borrowed from arrays."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, TypeAlias

from . import _raw
from ._context import Context
from ._descriptors import WeightsDesc, to_raw
from ._enums import GateLayout, Orientation, WeightsFlags
from ._handle import Handle
from ._tensors import Array, dtype_of, empty, stream_handle, tensor, tensor_array

Matrix: TypeAlias = "Array | Sequence[Array]"
"""All experts stacked [E,N,K], or one array [N,K] per expert."""

Path: TypeAlias = "str | bytes | os.PathLike[str]"


@dataclass(kw_only=True, slots=True)
class WeightSet:
    """Matrices, or their gradients; absent ones are None.

    gate_up [E,2I,H], gate and up [E,I,H], down [E,H,I]; the last two dimensions swapped with
    Orientation.IN_OUT; biases [E,N]. Each stacked, or a list of one array per expert.
    """

    gate_up: Matrix | None = None
    gate: Matrix | None = None
    up: Matrix | None = None
    down: Matrix | None = None
    gate_up_bias: Matrix | None = None
    gate_bias: Matrix | None = None
    up_bias: Matrix | None = None
    down_bias: Matrix | None = None

    def raw(self, keep: list[Any], *, write: bool = False, stream: int = 0) -> Any:
        """moec_weight_set of these arrays."""
        raw = _raw.moec_weight_set()
        for name in MATRICES:
            data, bias = getattr(self, name), getattr(self, f"{name}_bias")
            if data is not None or bias is not None:
                setattr(raw, name, _raw_matrix(name, data, bias, keep, write, stream))
        return raw

    def empty_like(self, dtype: Any = None) -> WeightSet:
        """Uninitialised arrays of the same shapes, in `dtype` or their own."""
        made = WeightSet()
        for item in fields(self):
            value = getattr(self, item.name)
            if _is_list(value):
                new: Any = [empty(tuple(a.shape), dtype or a, a) for a in value]
            else:
                new = None if value is None else empty(tuple(value.shape), dtype or value, value)
            setattr(made, item.name, new)
        return made


WEIGHTS = tuple(item.name for item in fields(WeightSet))
MATRICES = tuple(name for name in WEIGHTS if not name.endswith("_bias"))


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _raw_matrix(
    name: str, data: Any, bias: Any, keep: list[Any], write: bool, stream: int
) -> Any:
    if _is_list(data) and _is_list(bias) and len(data) != len(bias):
        raise ValueError(  # one count tells the library how many there are of both
            f"moec.WeightSet: {name} has {len(data)} arrays, {name}_bias {len(bias)}; "
            "one for each expert is needed in both"
        )
    raw = _raw.moec_matrix()
    for value, stacked, split in ((data, "data", "per_expert"), (bias, "bias", "per_expert_bias")):
        if value is None:
            continue
        if _is_list(value):
            setattr(raw, split, tensor_array(value, keep, write=write, stream=stream))
            raw.count = len(value)
        else:
            setattr(raw, stacked, tensor(value, keep, write=write, stream=stream))
    return raw


@dataclass(frozen=True, slots=True)
class WeightsInfo:
    """State of a Weights object (moec_weights_info)."""

    packed_bytes: int
    is_bound: bool
    is_packed: bool
    is_frozen: bool
    needs_source: bool
    packed_format: str


class Weights(Handle):
    """Expert weights, usable by every context of the same device.

    The arrays are borrowed: this object keeps them alive, and their values are read on each call,
    unless WeightsFlags.FROZEN, with which a packed copy may serve until refresh().
    """

    _free = _raw._core.moec_weights_free

    def __init__(
        self, context: Context, desc: WeightsDesc, held: WeightSet | None = None
    ) -> None:
        self.desc = desc
        self.set: WeightSet | None = None
        self._keep: list[Any] = []
        self._pointer = _raw.moec_weights_create(context.raw, to_raw(desc, _raw.moec_weights_desc))
        if held is not None:
            self.bind(held)

    @classmethod
    def of(
        cls,
        context: Context,
        *,
        gate_layout: GateLayout = GateLayout.GATE_THEN_UP,
        gate_up_orientation: Orientation = Orientation.OUT_IN,
        down_orientation: Orientation = Orientation.OUT_IN,
        frozen: bool = False,
        **matrices: Matrix,
    ) -> Self:
        """Weights bound to the given matrices (names of WeightSet), sizes and dtypes read from
        `down`."""
        held = WeightSet(**matrices)
        if held.down is None:
            raise TypeError("moec.Weights.of: down is missing; it gives the sizes")
        split = _is_list(held.down)
        first: Array = held.down[0] if split else held.down
        out, inner = first.shape[-2:]
        if down_orientation == Orientation.IN_OUT:
            out, inner = inner, out
        biases = (held.gate_up_bias, held.gate_bias, held.up_bias, held.down_bias)
        bias = next((b[0] if _is_list(b) else b for b in biases if b is not None), None)
        desc = WeightsDesc(
            num_experts=len(held.down) if split else first.shape[0],
            hidden=out,
            inter=inner,
            gate_layout=gate_layout,
            flags=WeightsFlags.FROZEN if frozen else WeightsFlags.NONE,
            gate_up_orientation=gate_up_orientation,
            down_orientation=down_orientation,
            dtype=dtype_of(first),
            bias_dtype=0 if bias is None else dtype_of(bias),
        )
        return cls(context, desc, held)

    def bind(self, held: WeightSet) -> Self:
        """Borrow matrices of the shapes that desc states. Raises ShapeError, DTypeError."""
        keep: list[Any] = []
        _raw.moec_weights_bind(self.raw, held.raw(keep))
        self.set, self._keep = held, keep
        return self

    def info(self) -> WeightsInfo:
        raw = _raw.moec_weights_info()
        _raw.moec_weights_query(self.raw, raw)
        values = {item.name: getattr(raw, item.name) for item in fields(WeightsInfo)}
        flags = ("is_bound", "is_packed", "is_frozen", "needs_source")
        return WeightsInfo(**values | {name: bool(values[name]) for name in flags})

    def pack(self, *, stream: Any = None) -> Self:
        """FROZEN only: make the packed copy now, in the library's memory."""
        _raw.moec_weights_pack(self.raw, None, stream_handle(stream))
        return self

    def refresh(self, first: int = 0, count: int | None = None, *, stream: Any = None) -> None:
        """Re-read experts [first, first+count) into the packed copy after their values changed."""
        number = self.desc.num_experts - first if count is None else count
        _raw.moec_weights_refresh(self.raw, first, number, stream_handle(stream))

    def release_source(self) -> None:
        """Forget the bound arrays: the packed copy serves alone. StateError when not packed."""
        _raw.moec_weights_release_source(self.raw)
        self.set, self._keep = None, []

    def save(self, path: Path) -> None:
        """Write the packed copy to a file."""
        _raw.moec_weights_save_sync(self.raw, path)

    def map(self, path: Path) -> Self:
        """Map such a file, read-only and shared. Raises CorruptError, MismatchError."""
        _raw.moec_weights_map_sync(self.raw, path)
        return self
