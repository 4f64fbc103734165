# SPDX-License-Identifier: Apache-2.0
"""The matrices of a set of experts, borrowed from arrays."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, TypeAlias

import numpy as np

from . import _raw
from ._context import Context, context_of
from ._descriptors import WeightsDesc, to_raw
from ._enums import (
    DType,
    GateLayout,
    MatrixName,
    Orientation,
    QuantFlags,
    Scheme,
    WeightsFlags,
)
from ._handle import Handle
from ._tensors import Array, dtype_of, empty, require, stream_handle, tensor, tensor_array

Matrix: TypeAlias = "Array | Sequence[Array]"
"""All experts stacked [E,N,K], or one array [N,K] per expert."""

Path: TypeAlias = "str | bytes | os.PathLike[str]"


@dataclass(kw_only=True, slots=True)
class Quant:
    """How the codes of a matrix become values (moec_quant); the scheme says which arrays it reads.
    GGUF's codes have their scales with them: an empty Quant marks them.

    Arrays of experts are stacked, or lists of one array per expert.
    """

    scales: Matrix | None = None
    scales2: Matrix | None = None
    zeros: Matrix | None = None
    codebook: Array | None = None
    scale_book: Array | None = None
    scale_offset: Matrix | None = None
    group_index: Matrix | None = None
    block_n: int = 0
    block_k: int = 0
    scale_block: int = 0
    flags: QuantFlags = QuantFlags.NONE


@dataclass(kw_only=True, slots=True)
class WeightSet:
    """Matrices, or their gradients; absent ones are None.

    gate_up [E,2I,H], gate and up [E,I,H], down [E,H,I]; the last two dimensions swapped with
    Orientation.IN_OUT; biases [E,N]. Each stacked, or a list of one array per expert. A matrix of
    codes has a Quant beside it, and the type and shape that moec.h says of its scheme.
    """

    gate_up: Matrix | None = None
    gate: Matrix | None = None
    up: Matrix | None = None
    down: Matrix | None = None
    gate_up_bias: Matrix | None = None
    gate_bias: Matrix | None = None
    up_bias: Matrix | None = None
    down_bias: Matrix | None = None
    gate_up_quant: Quant | None = None
    gate_quant: Quant | None = None
    up_quant: Quant | None = None
    down_quant: Quant | None = None

    def raw(self, keep: list[Any], *, write: bool = False, stream: int = 0) -> Any:
        """moec_weight_set of these arrays."""
        raw = _raw.moec_weight_set()
        for name in MATRICES:
            if any(getattr(self, name + part) is not None for part in ("", "_bias", "_quant")):
                setattr(raw, name, _raw_matrix(self, name, keep, write, stream))
        return raw

    def empty_like(self, dtype: Any = None) -> WeightSet:
        """Uninitialised arrays of the same shapes, in `dtype` or their own; none for codes, which
        have no gradient."""
        made = WeightSet()
        for name in WEIGHTS:
            value = getattr(self, name)
            if value is None or getattr(self, f"{name}_quant", None) is not None:
                continue
            if _is_list(value):
                new: Any = [empty(tuple(a.shape), dtype or a, a) for a in value]
            else:
                new = empty(tuple(value.shape), dtype or value, value)
            setattr(made, name, new)
        return made


_NAMES = tuple(item.name for item in fields(WeightSet))
WEIGHTS = tuple(name for name in _NAMES if not name.endswith("_quant"))
"""the arrays of a WeightSet: matrices, then biases"""
MATRICES = tuple(name for name in WEIGHTS if not name.endswith("_bias"))


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _first(name: str, matrix: Matrix) -> Array:
    """The array whose shape and dtype stand for a matrix. Raises, naming it, when it is none."""
    if not _is_list(matrix):
        require(**{name: matrix})
        return matrix
    if not matrix:
        raise ValueError(f"moec: {name} is an empty list; an array per expert is needed")
    require(**{f"{name}[0]": matrix[0]})
    return matrix[0]


def _refuse_dtype(name: str, array: Array) -> None:
    if dtype_of(array) not in (DType.F32, DType.F16, DType.BF16):
        raise TypeError(
            f"moec: {name} has dtype {array.dtype}; f32, f16 or bf16 is needed, or codes "
            f"with {name}_quant"
        )


def _raw_matrix(held: WeightSet, name: str, keep: list[Any], write: bool, stream: int) -> Any:
    """moec_matrix of a matrix, its bias and its quant."""
    raw = _raw.moec_matrix()
    bias, quant = f"{name}_bias", getattr(held, f"{name}_quant")
    # What it is called here; the struct, and the fields for a stacked array and for a list.
    places = [(name, getattr(held, name), raw, "data", "per_expert"),
              (bias, getattr(held, bias), raw, "bias", "per_expert_bias")]
    if quant is not None:
        codes = _raw.moec_quant()
        keep.append(codes)
        raw.quant = codes
        for item in fields(quant):
            value = getattr(quant, item.name)
            if item.type in ("int", "QuantFlags"):
                setattr(codes, item.name, value)
            else:
                label = f"{name}_quant.{item.name}"
                places.append((label, value, codes, item.name, f"per_expert_{item.name}"))
    counts: dict[str, int] = {}
    for label, value, struct, stacked, split in places:
        if value is None:
            continue
        if _is_list(value) and hasattr(struct, split):
            setattr(struct, split, tensor_array(value, keep, label, write=write, stream=stream))
            counts[label] = raw.count = len(value)
        else:
            setattr(struct, stacked, tensor(value, keep, label, write=write, stream=stream))
    if len(set(counts.values())) > 1:  # one count tells the library how many there are of each
        first, *others = counts
        found = "".join(f", {label} {counts[label]}" for label in others)
        raise ValueError(
            f"moec.WeightSet: {first} has {counts[first]} arrays{found}; "
            "one for each expert is needed in all"
        )
    return raw


def _schemes(
    held: WeightSet, scheme: Scheme, down_scheme: Scheme | None
) -> tuple[Scheme, Scheme]:
    """Those of gate and up, and of down; NONE where they are plain. Raises where a Quant has no
    scheme, or a scheme no Quant."""
    first, down = Scheme(scheme), Scheme(scheme if down_scheme is None else down_scheme)
    own = down_scheme is not None
    coded = [name for name in MATRICES if getattr(held, f"{name}_quant") is not None]
    gates, last = [name for name in coded if name != "down"], "down" in coded
    for names, argument, value in ((gates, "scheme", first),
                                   (["down"] * last, "down_scheme" if own else "scheme", down)):
        if names and value == Scheme.NONE:
            raise TypeError(
                f"moec.Weights.of: {' and '.join(f'{name}_quant' for name in names)} given, but "
                f"{argument} is NONE; give the scheme of these codes"
            )
    if own and down != Scheme.NONE and not last:
        raise TypeError(
            f"moec.Weights.of: down_scheme is {down.name}, but down_quant is None, so down would "
            "be plain; give down_quant (of GGUF an empty moec.Quant())"
        )
    if first != Scheme.NONE and (not coded or own and not gates):
        found = f"only down has a Quant, with down_scheme {down.name}, so gate and up" if coded \
            else "no matrix has a Quant, so all"
        raise TypeError(
            f"moec.Weights.of: scheme is {first.name}, but {found} would be plain; give a Quant "
            "of each matrix of codes (of GGUF an empty moec.Quant())"
        )
    return first if gates else Scheme.NONE, down if last else Scheme.NONE


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
        raw = to_raw(desc, _raw.moec_weights_desc)
        self._pointer = _raw.moec_weights_create(context_of(context), raw)
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
        scheme: Scheme = Scheme.NONE,
        down_scheme: Scheme | None = None,
        dtype: Any = None,
        num_experts: int | None = None,
        hidden: int | None = None,
        inter: int | None = None,
        **matrices: Matrix | Quant,
    ) -> Self:
        """Weights bound to the given matrices (names of WeightSet). Matrices with a Quant are codes
        of `scheme`, down of `down_scheme` if that is given, and `dtype` is that of the values. The
        package's README has a table of the arrays of each scheme; read_experts() finds them.

        Sizes and dtypes are read from `down`. Packed codes, of other schemes than INT8 and FP8,
        do not tell them: then `hidden`, `inter` and, of a stack, `num_experts` are needed."""
        held = WeightSet(**matrices)  # type: ignore[arg-type]
        if held.down is None:
            raise TypeError("moec.Weights.of: down is missing; it gives the sizes")
        of_gate_up, of_down = _schemes(held, scheme, down_scheme)
        split = _is_list(held.down)
        first = _first("down", held.down)
        if dtype is None and held.down_quant is None:
            _refuse_dtype("down", first)
        if of_down not in (Scheme.NONE, Scheme.INT8, Scheme.FP8):
            sizes = {"hidden": hidden, "inter": inter,
                     "num_experts": len(held.down) if split else num_experts}
            missing = [name for name, size in sizes.items() if size is None]
            if missing:
                raise TypeError(
                    f"moec.Weights.of: {' and '.join(missing)} missing; codes of {of_down.name} do "
                    "not tell their sizes"
                )
        out, inner = (0, 0, *first.shape)[-2:]
        if down_orientation == Orientation.IN_OUT:
            out, inner = inner, out
        biases = (f"{name}_bias" for name in MATRICES)
        bias = next((_first(n, b) for n in biases if (b := getattr(held, n)) is not None), None)
        desc = WeightsDesc(
            num_experts=len(held.down) if split else num_experts or first.shape[0],
            hidden=hidden or out,
            inter=inter or inner,
            gate_layout=gate_layout,
            flags=WeightsFlags.FROZEN if frozen else WeightsFlags.NONE,
            gate_up_orientation=gate_up_orientation,
            down_orientation=down_orientation,
            dtype=dtype_of(first if dtype is None else dtype),
            bias_dtype=0 if bias is None else dtype_of(bias),
            gate_up_scheme=of_gate_up,
            down_scheme=of_down,
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
        """FROZEN only: make the packed copy now, in the library's memory. On CUDA of codes alone,
        one tensor an expert as stacks; release_source() then spares the arrays."""
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

    def dequantise(
        self, matrix: MatrixName, expert: int, *, dtype: Any = None, out: Array | None = None,
        stream: Any = None,
    ) -> Array:
        """One expert's matrix as values, [N,K] or, IN_OUT, [K,N]: in fp32 as moec.h says of the
        scheme, rounded once to `dtype`, that of the weights unless given. `out` takes them. Raises
        StateError when nothing is bound, InvalidArgumentError when there is no such matrix."""
        if out is None:
            out = self.memory_of(matrix, dtype)
        keep: list[Any] = []
        queue = stream_handle(stream)
        to = tensor(out, keep, "out", write=True, stream=queue)
        _raw.moec_weights_dequantise(self.raw, matrix, expert, to, queue)
        return out

    def orientation_of(self, matrix: MatrixName) -> Orientation:
        """How a matrix is bound."""
        down = matrix == MatrixName.DOWN
        return self.desc.down_orientation if down else self.desc.gate_up_orientation

    def memory_of(self, matrix: MatrixName, dtype: Any = None, *lead: int) -> Array:
        """An array for a matrix as values, [*lead,N,K] or, IN_OUT, [*lead,K,N], beside down."""
        rows = self.desc.inter * (2 if matrix == MatrixName.GATE_UP else 1)
        down = matrix == MatrixName.DOWN
        shape = (self.desc.hidden, self.desc.inter) if down else (rows, self.desc.hidden)
        bound = self.set.down if self.set else None
        like = np.empty(0) if bound is None else _first("down", bound)  # the call refuses it
        turned = self.orientation_of(matrix) == Orientation.IN_OUT
        made = shape[::-1] if turned else shape
        return empty((*lead, *made), dtype or self.desc.dtype, like)

    def save(self, path: Path) -> None:
        """Write the packed copy to a file."""
        _raw.moec_weights_save_sync(self.raw, path)

    def map(self, path: Path) -> Self:
        """Map such a file, read-only and shared; on CUDA a copy. Raises CorruptError,
        MismatchError."""
        _raw.moec_weights_map_sync(self.raw, path)
        return self
