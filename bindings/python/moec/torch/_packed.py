# SPDX-License-Identifier: Apache-2.0
"""A stack of experts' matrices held as codes, in a tensor of the shape and type of its values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .._enums import GateLayout, MatrixName, Orientation
from .._tensors import dtype_of
from .._weights import Quant, Weights
from ..codes import Coded, read_codes
from ..kinds import BY_NAME
from ..quant_config import Declared
from ._codes import View
from ._engine import context_of, current_stream

_aten = torch.ops.aten
_FACTORIES = {
    _aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default,
    _aten.full_like.default, _aten.rand_like.default, _aten.randn_like.default,
    _aten.new_empty.default, _aten.new_zeros.default, _aten.new_ones.default,
    _aten.new_full.default, _aten.new_empty_strided.default,
}


@dataclass(frozen=True)
class Store:
    """How a stack is stored: all but its tensors."""

    kind: str
    """name in kinds.KINDS"""
    count: int
    """experts"""
    names: tuple[str, ...] = ("",)
    """the matrices that make it, one above the other: names of parts begin with these"""
    turned: bool = False
    """the tensor's last two dimensions are those of the codes, exchanged"""
    in_out: bool = False
    """orientation of the codes, where their kind can have both"""
    said: Declared = Declared("")


class PackedTensor(Tensor):
    """Codes of a stack [E,N,K] behind a tensor of its values' shape and type.

    What reads it as a plain tensor gets the values, made for the occasion; what would write to it
    raises. Its type is fixed: .to(), .half() and .float() move it and keep codes and type.
    parts: name -> tensor, as a checkpoint has them. dequantise() makes the plain tensor."""

    moec_packed = True
    parts: dict[str, Tensor]
    store: Store
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls, parts: Mapping[str, Tensor] | PackedTensor, store: Store | None = None,
        shape: tuple[int, ...] = (), dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> PackedTensor:
        if isinstance(parts, PackedTensor):  # accelerate makes a parameter of its class
            return nn.Parameter(parts.detach(), requires_grad)  # type: ignore[return-value]
        assert store is not None
        device = next(iter(parts.values())).device
        new: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made: PackedTensor = new(cls, tuple(shape), dtype=dtype, device=device)
        made.parts, made.store = dict(parts), store
        return made

    @classmethod
    def from_bnb(cls, codes: Tensor, state: Any, *, in_out: bool = False) -> PackedTensor:
        """A stack [E,...] of bitsandbytes' codes and QuantState, as quantize_4bit() gives them;
        in_out: its matrices are [in,out]."""
        about = {f".{name}": part.to(codes.device)
                 for name, part in state.as_dict(packed=True).items()}
        shape = tuple(state.shape)
        store = Store("bnb", shape[0], in_out=in_out)
        return cls({"": codes, **about}, store, shape, state.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return (f"PackedTensor({self.store.kind}, shape={list(self.shape)}, dtype={self.dtype}, "
                f"device={self.device}, bytes={self.packed_bytes})")

    @property
    def data(self) -> PackedTensor:  # type: ignore[override]
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, PackedTensor) or _about(value) != _about(self):
            raise RuntimeError(f"moec: {value!r} in the place of {self!r}; equal stores are needed")
        _set_data(self, value)
        self.parts = value.parts

    @property
    def packed_bytes(self) -> int:
        """Bytes of the codes and all that is beside them."""
        return sum(part.nbytes for part in self.parts.values())

    def matrices(self) -> list[Coded]:
        """The matrices as the library takes them, one above the other."""
        store = self.store
        kind = BY_NAME[store.kind]
        turned = Orientation.IN_OUT if store.in_out else Orientation.OUT_IN
        return [read_codes(self.parts, [name], kind, store.said, split=False, count=store.count,
                           orientation=turned) for name in store.names]

    def dequantise(self, expert: int | None = None) -> Tensor:
        """The values as a plain tensor: of all experts, or of one."""
        found = [_values(self, one, range(self.shape[0]) if expert is None else (expert,))
                 for one in self.matrices()]
        if self.store.turned:
            found = [one.transpose(1, 2) for one in found]
        whole = found[0] if len(found) == 1 else torch.cat(found, 1)
        return whole.contiguous() if expert is None else whole[0]

    def with_parts(self, fn: Callable[[Tensor], Tensor]) -> PackedTensor:
        """The same of other tensors."""
        made = {name: fn(part) for name, part in self.parts.items()}
        return PackedTensor(made, self.store, tuple(self.shape), self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None and isinstance(args[0], PackedTensor):
            found = special(func, *args, **kwargs)
            if found is not NotImplemented:
                return found
        if func in _FACTORIES and isinstance(args[0], PackedTensor):
            like = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype,
                                       device="meta")
            return func(like, *args[1:], **({"device": args[0].device} | kwargs))
        _refuse_writes(func, args, kwargs)
        args, kwargs = tree_map_only(PackedTensor, PackedTensor.dequantise, (args, kwargs))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedTensor:
        if id(self) not in memo:
            made = self.with_parts(lambda part: part.detach().clone())
            memo[id(self)] = _as_parameter(made) if isinstance(self, nn.Parameter) else made
        copied: PackedTensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Codes in 8-bit floats as bytes: pickle cannot store torch's.
        bits = {name: str(part.dtype).removeprefix("torch.") for name, part in self.parts.items()}
        parts = {name: part.view(torch.uint8) if part.is_floating_point() and part.itemsize == 1
                 else part for name, part in self.parts.items()}
        store = tuple(getattr(self.store, name) for name in Store.__dataclass_fields__)
        said = self.store.said
        about = (*store[:-1], tuple(getattr(said, n) for n in Declared.__dataclass_fields__))
        return rebuild, (parts, bits, about, tuple(self.shape), self.dtype,
                         isinstance(self, nn.Parameter))


def rebuild(
    parts: dict[str, Tensor], bits: dict[str, str], about: tuple[Any, ...], shape: tuple[int, ...],
    dtype: torch.dtype, is_parameter: bool,
) -> PackedTensor:
    """A PackedTensor from what pickle stored of it."""
    held = {name: part if part.dtype == getattr(torch, bits[name])
            else part.view(getattr(torch, bits[name])) for name, part in parts.items()}
    made = PackedTensor(held, Store(*about[:-1], Declared(*about[-1])), shape, dtype)
    return _as_parameter(made) if is_parameter else made


torch.serialization.add_safe_globals([rebuild])


_set_data: Any = Tensor.data.__set__  # type: ignore[attr-defined]


def _about(packed: PackedTensor) -> Any:
    """What two of them share where one can take the other's codes."""
    layout = {name: (part.shape, part.dtype) for name, part in packed.parts.items()}
    return layout, packed.shape, packed.dtype, replace(packed.store, said=Declared(""))


def _as_parameter(tensor: PackedTensor) -> Any:
    return nn.Parameter(tensor, requires_grad=False)


def _refuse_writes(func: Any, args: Any, kwargs: Any) -> None:
    """Raise where an operator would write to codes."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        held = value if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(one, PackedTensor) for one in held):
            raise RuntimeError(
                f"moec: {func._schema.name.removeprefix('aten::')} would write to packed experts, "
                "whose codes cannot take it; dequantise() makes a plain tensor, "
                "moec.transformers.save_merged() a plain checkpoint"
            )


# ---- operators that codes stand
def _same(func: Any, packed: PackedTensor, *_: Any, **__: Any) -> PackedTensor:
    return packed.with_parts(lambda part: part)


def _clone(func: Any, packed: PackedTensor, **_: Any) -> PackedTensor:
    return packed.with_parts(torch.clone)


def _to(func: Any, packed: PackedTensor, **kwargs: Any) -> PackedTensor:
    device = kwargs.get("device")
    options = {"non_blocking": kwargs.get("non_blocking", False)}
    return packed.with_parts(lambda part: part.to(device or part.device, **options))


def _copy(func: Any, packed: PackedTensor, source: Any, *_: Any, **__: Any) -> PackedTensor:
    if not isinstance(source, PackedTensor):
        # DDP sends every rank the values of the first, which are those that it has.
        held = packed.dequantise()
        if held.shape == source.shape and torch.equal(held, source.to(held)):
            return packed
        raise RuntimeError(
            "moec: copy_ of other plain values to packed experts; they take those of packed experts"
        )
    if _about(packed) != _about(source):
        raise RuntimeError(f"moec: copy_ of {source!r} to {packed!r}; equal stores are needed")
    for name, part in packed.parts.items():
        part.copy_(source.parts[name])
    return packed


def _set(func: Any, packed: PackedTensor, source: Any) -> PackedTensor:
    """What torch's parametrizations do with a parameter: to itself it may be set."""
    if not isinstance(source, PackedTensor) or _about(packed) != _about(source):
        raise RuntimeError(f"moec: set_ of {source!r} to {packed!r}; equal stores are needed")
    packed.parts = source.parts
    return packed


def _select(func: Any, packed: PackedTensor, dim: int, index: int) -> Any:
    if dim % packed.dim() != 0:
        return NotImplemented
    if not -len(packed) <= index < len(packed):
        raise IndexError(f"moec: expert {index} of {len(packed)} packed experts")
    return packed.dequantise(index % len(packed))


def _split(func: Any, packed: PackedTensor, *_: Any, **__: Any) -> Any:
    """fully_shard and distribute_tensor cut a parameter so, and would hold its values from then
    on."""
    caller = sys._getframe(2).f_globals.get("__name__", "")  # of what __torch_dispatch__ is asked
    if caller.startswith("torch.distributed."):
        raise RuntimeError(
            f"moec: {packed!r} would become a plain DTensor; fully_shard(..., ignored_params="
            "{p for p in model.parameters() if isinstance(p, moec.torch.PackedTensor)}) leaves "
            "packed experts to every rank"
        )
    return NotImplemented


_SPECIAL: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _same, _aten.alias.default: _same, _aten.clone.default: _clone,
    _aten._to_copy.default: _to, _aten.copy_.default: _copy, _aten.set_.source_Tensor: _set,
    _aten.select.int: _select, _aten.chunk.default: _split, _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
}


# ---- values
def _values(packed: PackedTensor, coded: Coded, experts: Any) -> Tensor:
    """Of some experts of one matrix, as its codes lie."""
    device, dtype = packed.device, packed.dtype
    weights, _keep = _alone(coded, packed.store.count, device, dtype)
    rows, columns = coded.extents
    made = torch.empty((len(experts), rows, columns), dtype=dtype, device=device)
    for place, expert in zip(made, experts, strict=True):
        weights.dequantise(MatrixName.DOWN, expert, out=View(place), stream=current_stream(made))
    return made


def _alone(coded: Coded, count: int, device: torch.device, dtype: torch.dtype) -> Any:
    """A matrix as the down of experts whose up, which nobody reads, is of zeros."""
    rows, columns = coded.extents
    out, inner = (columns, rows) if coded.orientation == Orientation.IN_OUT else (rows, columns)
    zero = torch.zeros((inner, out), dtype=dtype, device=device)
    codes, quant = placed(coded)
    weights = Weights.of(
        context_of(device), gate_layout=GateLayout.NONE, down_orientation=coded.orientation,
        down_scheme=coded.scheme, num_experts=count, hidden=out, inter=inner,
        dtype=dtype_of(str(dtype).removeprefix("torch.")), up=[View(zero)] * count,
        down=codes, down_quant=quant,
    )
    return weights, zero


def placed(coded: Coded) -> tuple[View, Quant]:
    """Codes and Quant of a matrix, as views that the library reads."""
    views = {item.name: View(value.contiguous()) for item in fields(Quant)
             if isinstance(value := getattr(coded.quant, item.name), Tensor)}
    assert isinstance(coded.codes, Tensor)
    return View(coded.codes.contiguous()), replace(coded.quant, **views)
