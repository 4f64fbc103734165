# SPDX-License-Identifier: Apache-2.0
"""Adapters (LoRA): low-rank terms beside the matrices of experts, borrowed from arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from . import _raw
from ._context import Context, context_of
from ._descriptors import AdaptersDesc, to_raw
from ._enums import MatrixName, QuantiseKind
from ._handle import Handle
from ._quantise import Quantised, QuantiseCall
from ._tensors import Array, empty, kind_of, require, stream_handle, tensor
from ._weights import Weights


@dataclass(kw_only=True, slots=True)
class Factors:
    """One term scale * (x A^T) B^T of a matrix [N,K] of every expert, or its gradients.

    a [E,r,K], or [1,r,K] for all experts; b [E,N,r]; strides may be any that are not negative.
    scale is alpha / r, or as it was trained; of gradients it is 0.
    """

    a: Array | None = None
    b: Array | None = None
    scale: float = 0.0

    @classmethod
    def from_peft(
        cls, lora_a: Array | None, lora_b: Array | None, num_experts: int, scale: float, *,
        exchanged: bool = False,
    ) -> Factors:
        """Views of PEFT's storage of a stack, without a copy: lora_A [E r,K] expert by expert,
        lora_B [N,r E] rank by rank. exchanged: lora_A [E r,N] is beside the output, lora_B [K,r E]
        beside the input. Raises ValueError, naming it, for other shapes."""
        shapes = {"lora_A": None if lora_a is None else tuple(lora_a.shape),
                  "lora_B": None if lora_b is None else tuple(lora_b.shape)[::-1]}
        ranks = {name: shape[0] // num_experts if len(shape) == 2 else 0
                 for name, shape in shapes.items() if shape is not None}
        for name, rank in ranks.items():
            shape: Any = shapes[name]
            if not rank or shape[0] != max(ranks.values()) * num_experts:
                shown = list(shape if name == "lora_A" else shape[::-1])
                raise ValueError(
                    f"moec.Factors.from_peft: {name} has the shape {shown}; lora_A [E r,in] and "
                    f"lora_B [out,r E] of {num_experts} experts are needed"
                )
        first = second = None  # [E,r,beside lora_A], [E,r,beside lora_B]
        if lora_a is not None:
            first = lora_a.reshape(num_experts, ranks["lora_A"], -1)
        if lora_b is not None:
            second = lora_b.reshape(-1, ranks["lora_B"], num_experts).swapaxes(0, 2)
        a, b = (second, first) if exchanged else (first, second)
        return cls(a=a, b=None if b is None else b.swapaxes(1, 2), scale=scale)

    def empty_like(self, dtype: Any = None) -> Factors:
        """Uninitialised arrays of the same shapes for the gradients, in `dtype` or their own."""
        made = {n: empty(tuple(t.shape), dtype or t, t)
                for n in ("a", "b") if (t := getattr(self, n)) is not None}
        return Factors(**made)


@dataclass(kw_only=True, slots=True)
class Adapter:
    """The terms of one adapter, or their gradients; those that it has none for are None.

    gate_up N = 2I in the order of AdaptersDesc.gate_layout, gate and up N = I, down N = H.
    """

    gate_up: Factors | None = None
    gate: Factors | None = None
    up: Factors | None = None
    down: Factors | None = None

    def empty_like(self, dtype: Any = None) -> Adapter:
        """Uninitialised arrays for the gradients of all factors."""
        held = {n: f for n in PLACES if (f := getattr(self, n)) is not None}
        return Adapter(**{name: factors.empty_like(dtype) for name, factors in held.items()})


PLACES = tuple(item.name for item in fields(Adapter))
"""the matrices that an adapter can have factors for"""


def raw_adapters(
    adapters: Sequence[Adapter], keep: list[Any], name: str, *, write: bool = False, stream: int = 0
) -> Any:
    """C array of moec_adapter; messages call it `name`."""
    items = _raw.adapter_array(len(adapters))
    for index, adapter in enumerate(adapters):
        if not isinstance(adapter, Adapter):
            raise TypeError(
                f"moec: {name}[{index}] is {kind_of(adapter)}; a moec.Adapter is needed"
            )
        raw = _raw.moec_adapter()
        for place in PLACES:
            factors = getattr(adapter, place)
            if factors is None:
                continue
            label = f"{name}[{index}].{place}"
            if not isinstance(factors, Factors):
                raise TypeError(f"moec: {label} is {kind_of(factors)}; moec.Factors are needed")
            setattr(raw, place, _raw_factors(factors, keep, label, write, stream))
        items[index] = raw
    keep.append(items)
    return items.cast()


def _raw_factors(factors: Factors, keep: list[Any], name: str, write: bool, stream: int) -> Any:
    raw = _raw.moec_factors()
    raw.scale = factors.scale
    for part in ("a", "b"):
        array = getattr(factors, part)
        if array is not None:
            label = f"{name}.{part}"
            require(**{label: array})
            setattr(raw, part, tensor(array, keep, label, write=write, stream=stream))
    return raw


class Adapters(Handle):
    """Adapters of a set of experts, which calls add up: give them to Experts.forward or
    Layer.forward, in place of merging them.

    The arrays are borrowed: this object keeps them alive, and each call reads their values.
    """

    _free = _raw._core.moec_adapters_free

    def __init__(
        self, context: Context, desc: AdaptersDesc, adapters: Sequence[Adapter] = ()
    ) -> None:
        self.desc, self._context = desc, context
        self.held: tuple[Adapter, ...] = ()
        self._keep: list[Any] = []
        self._pointer = _raw.moec_adapters_create(
            context_of(context), to_raw(desc, _raw.moec_adapters_desc)
        )
        if adapters:
            self.bind(adapters)

    def bind(self, adapters: Sequence[Adapter]) -> Adapters:
        """Borrow 1 to 256 adapters in the place of those before. Raises ShapeError, DTypeError,
        LayoutError, InvalidArgumentError, naming list[i].matrix.factor."""
        keep: list[Any] = []
        raw = raw_adapters(adapters, keep, "list")
        _raw.moec_adapters_bind(self.raw, raw, len(adapters))
        self.held, self._keep = tuple(adapters), keep
        return self

    def merge(self, weights: Weights, *, stream: Any = None) -> None:
        """Add scale B A of all that is bound to plain weights, with one rounding to their dtype.
        Raises UnsupportedError for codes, which merge_copy and merge_quantised take, AliasError
        where a matrix overlaps a factor."""
        self._merge(_raw.moec_adapters_merge, weights, stream)

    def unmerge(self, weights: Weights, *, stream: Any = None) -> None:
        """Subtract it, which gives the values before back only up to that rounding."""
        self._merge(_raw.moec_adapters_unmerge, weights, stream)

    def merge_copy(
        self, weights: Weights, matrix: MatrixName, *, dtype: Any = None, out: Array | None = None,
        stream: Any = None,
    ) -> Array:
        """The values of one matrix of all experts, plain or of codes, with scale B A of all that is
        bound: [E,N,K] or, IN_OUT, [E,K,N], of `dtype`, that of the weights unless given. `out`
        takes them; the weights stay as they are. Raises InvalidArgumentError where no adapter has
        factors of the matrix."""
        return self._copy(weights, matrix, dtype, out, stream, None)

    def merge_quantised(
        self, weights: Weights, matrix: MatrixName, kind: QuantiseKind | str, *, dtype: Any = None,
        out: Array | None = None, stream: Any = None, **options: Any,
    ) -> Quantised:
        """Codes of these values, in one call: kind and options are those of moec.quantise, the
        orientation is that of the weights. The values lie in `out` meanwhile."""
        _check(weights)
        count = self.desc.num_experts
        values = weights.memory_of(matrix, dtype, count) if out is None else out
        call = QuantiseCall(self._context, values, kind, weights.orientation_of(matrix), stream,
                            **options)
        self._copy(weights, matrix, dtype, values, stream, call.raw)
        return call.made

    def _copy(
        self, weights: Weights, matrix: MatrixName, dtype: Any, out: Array | None, stream: Any,
        quantised: Any,
    ) -> Array:
        _check(weights)
        values = weights.memory_of(matrix, dtype, self.desc.num_experts) if out is None else out
        keep: list[Any] = []
        queue = stream_handle(stream)
        to = tensor(values, keep, "out", write=True, stream=queue)
        _raw.moec_adapters_merge_copy(self.raw, weights.raw, matrix, to, quantised, queue)
        return values

    def _merge(self, function: Any, weights: Weights, stream: Any) -> None:
        _check(weights)
        function(self.raw, weights.raw, stream_handle(stream))


def _check(weights: Weights) -> None:
    if not isinstance(weights, Weights):
        raise TypeError(f"moec: weights is {kind_of(weights)}; a moec.Weights is needed")
