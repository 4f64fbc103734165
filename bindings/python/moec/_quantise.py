# SPDX-License-Identifier: Apache-2.0
"""Codes and scales of weights from plain arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import _raw
from ._context import Context, context_of
from ._enums import DType, Orientation, QuantiseFlags, QuantiseKind, Scheme
from ._tensors import Array, dtype_of, empty, require, set_tensors, stream_handle
from ._weights import Quant

_TENSORS = ("scales", "scales2", "zeros", "codebook", "scale_book", "scale_offset")


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix of codes: Weights.of(scheme=q.scheme, **q.named("down"), ...)."""

    scheme: Scheme
    codes: Array
    quant: Quant

    def named(self, matrix: str) -> dict[str, Any]:
        """The codes and their Quant under the names of a WeightSet."""
        return {matrix: self.codes, f"{matrix}_quant": self.quant}


def _kind(kind: QuantiseKind | str) -> QuantiseKind:
    try:
        return QuantiseKind[kind.upper()] if isinstance(kind, str) else QuantiseKind(kind)
    except (KeyError, ValueError):
        names = ", ".join(item.name.lower() for item in QuantiseKind)
        raise ValueError(f"moec.quantise: kind is {kind!r}; {names} exist") from None


def quantise(
    context: Context,
    array: Array,
    kind: QuantiseKind | str,
    *,
    asymmetric: bool = False,
    nested: bool = False,
    orientation: Orientation = Orientation.OUT_IN,
    scale_dtype: Any = None,
    block_n: int = 0,
    block_k: int = 0,
    stream: Any = None,
) -> Quantised:
    """Codes and scales of `array` [E,N,K] (IN_OUT: [E,K,N]) f32, f16 or bf16, beside it.

    kind         QuantiseKind or its name, such as "nf4"; moec.h says whose bytes they are
    asymmetric   INT8, INT4: with zero points
    nested       NF4, FP4: the scales are quantised, too
    scale_dtype  INT8, INT4, FP8: that of the array (None), or f32
    block_n, block_k  of INT4, FP8, NF4 and FP4; 0 = as the kind has it

    Codes are OUT_IN whatever the orientation, but for NF4 and FP4, which keep it. Raises
    ShapeError, DTypeError, InvalidArgumentError.
    """
    call = QuantiseCall(context, array, kind, orientation, stream, asymmetric=asymmetric,
                        nested=nested, scale_dtype=scale_dtype, block_n=block_n, block_k=block_k)
    set_tensors(call.raw, call.keep, stream=call.stream, source=array)
    _raw.moec_quantise(context_of(context), call.raw, call.stream)
    return call.made


class QuantiseCall:
    """The arguments of moec_quantise for a source like `array`, all but the source, and `made`,
    arrays beside it that the call fills."""

    def __init__(
        self, context: Context, array: Array, kind: QuantiseKind | str, orientation: Orientation,
        stream: Any, *, asymmetric: bool = False, nested: bool = False, scale_dtype: Any = None,
        block_n: int = 0, block_k: int = 0,
    ) -> None:
        require(array=array)
        if len(array.shape) != 3:
            raise ValueError(
                f"moec.quantise: array has {len(array.shape)} dimensions; 3 are needed, experts "
                "first"
            )
        experts, rows, columns = (int(extent) for extent in array.shape)
        in_out = orientation == Orientation.IN_OUT
        desc = _raw.moec_quantise_desc()
        desc.kind = _kind(kind)
        desc.flags = (QuantiseFlags.ASYMMETRIC * asymmetric) | (QuantiseFlags.NESTED * nested)
        desc.orientation = orientation
        desc.dtype = dtype_of(array)
        desc.scale_dtype = 0 if scale_dtype is None else dtype_of(scale_dtype)
        desc.num_experts = experts
        desc.out_features, desc.in_features = (columns, rows) if in_out else (rows, columns)
        desc.block_n, desc.block_k = block_n, block_k
        info, raw = _raw.moec_quantise_info(), _raw.moec_quant()
        _raw.moec_quantise_query(context_of(context), desc, info, raw)

        def beside(tensor: Any) -> Array | None:
            _, dtype, _, _, shape = _raw.tensor_describe(tensor)
            return empty(shape, DType(dtype), array) if shape else None

        codes = beside(info.codes)
        arrays = {name: made for name in _TENSORS
                  if (made := beside(getattr(raw, name))) is not None}
        self.keep: list[Any] = [desc, raw]
        self.stream = stream_handle(stream)
        self.raw = _raw.moec_quantise_args()
        self.raw.desc, self.raw.quant = desc, raw
        set_tensors(self.raw, self.keep, write=True, stream=self.stream, codes=codes)
        set_tensors(raw, self.keep, write=True, stream=self.stream, **arrays)
        quant = Quant(**arrays, block_n=int(raw.block_n), block_k=int(raw.block_k),
                      scale_block=int(raw.scale_block))
        self.made = Quantised(Scheme(info.scheme), codes, quant)
