# SPDX-License-Identifier: Apache-2.0
"""Experts whose matrices are packed: how the library's weights are bound to a module's codes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._enums import GateLayout, Orientation, Scheme
from .._spec import Spec
from .._tensors import dtype_of
from .._weights import Weights
from ..quant_config import Declared
from ..torch._codes import View
from ..torch._constants import constant, module_of
from ..torch._engine import context_of
from ..torch._frozen import Numbered
from ..torch._packed import PackedTensor, Store, placed

STACKS = ("gate_up_proj", "up_proj", "down_proj")
"""parameters of experts modules that can be packed"""
_bound: weakref.WeakKeyDictionary[nn.Module, dict[torch.dtype, PackedWeights]] = (
    weakref.WeakKeyDictionary())
_read: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[Any, PackedTensor]]] = (
    weakref.WeakKeyDictionary())


def stored(module: nn.Module, name: str) -> Tensor | None:
    """A module's tensor as it is held: the codes of a parameter that bitsandbytes parametrised,
    and of transformers' FP8Experts."""
    lists: Any = getattr(module, "parametrizations", None)
    chain = lists[name] if lists is not None and name in lists else ()
    state = getattr(chain[0], "quant_state", None) if len(chain) == 1 else None
    if state is not None:
        codes = chain.original
        return _once(module, name, (codes, state),
                     lambda: from_state(codes.detach(), state, is_in_out(module)))
    value: Any = getattr(module, name, None)
    scale: Any = getattr(module, f"{name}_scale_inv", None)
    if scale is not None and value is not None and not isinstance(value, PackedTensor):
        return _once(module, name, (value, scale), lambda: _from_fp8(module, value, scale))
    return value  # type: ignore[no-any-return]


def _once(
    module: nn.Module, name: str, of: tuple[Any, Any], make: Callable[[], PackedTensor]
) -> PackedTensor:
    """What was made of these objects where they lie, or what is made of them now."""
    mark = [(id(one), one.data_ptr() if isinstance(one, Tensor) else 0) for one in of]
    held = _read.setdefault(module, {})
    if name not in held or held[name][0] != mark:
        held[name] = mark, make()
    return held[name][1]


def _from_fp8(module: Any, codes: Tensor, scales: Tensor) -> PackedTensor:
    """A stack of transformers' FP8Experts; values are of the config's type."""
    if codes.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise NotImplementedError(
            f"moec.transformers: {type(module).__name__} has codes in {codes.dtype}; 8-bit floats "
            "can be read"
        )
    dtype = getattr(module.config, "dtype", None)
    said = Declared("", block=None if module.block_size is None else tuple(module.block_size))
    parts = {"": codes.detach(), "_scale_inv": scales.detach()}
    return PackedTensor(parts, Store("fp8-block", codes.shape[0], said=said), tuple(codes.shape),
                        dtype if isinstance(dtype, torch.dtype) else torch.bfloat16)


def is_in_out(module: nn.Module) -> bool:
    """Whether a module's matrices are [in,out]; Llama-4's are, which does not say so."""
    return bool(getattr(module, "is_transposed", True))


def from_state(codes: Tensor, state: Any, in_out: bool) -> PackedTensor:
    """A stack [E,...] of bitsandbytes' codes and QuantState; in_out: its matrices are [in,out]."""
    about = {f".{name}": part.to(codes.device) for name, part in
             state.as_dict(packed=True).items()}
    shape = tuple(state.shape)
    store = Store("bnb", shape[0], in_out=in_out)
    return PackedTensor({"": codes, **about}, store, shape, state.dtype)


@constant
def has_packed(of: nn.Module | int) -> bool:
    """Whether any matrix of an experts module is packed."""
    module = module_of(of)
    return any(isinstance(stored(module, name), PackedTensor) for name in STACKS)


def packed_weights(
    module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype, spec: Callable[[], Spec],
) -> PackedWeights:
    """The library's weights over a module's tensors, some of them packed, for values of a type;
    `number` names them in a call. spec: makes what says how the tensors lie."""
    held = _bound.setdefault(module, {})
    found = held.get(dtype)
    if found is None or not found.fits(tensors):
        found = held[dtype] = PackedWeights(tensors, dtype, spec())
    return found


class PackedWeights(Numbered):
    """Weights over a module's codes, plain matrices and biases, which each call reads."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, spec: Spec) -> None:
        layout, orientation = spec.gate_layout, spec.down_orientation
        self._spec, self._held = spec, {n: t.detach() for n, t in tensors.items()}
        self._dtype, self._marks = dtype, _marks(tensors, dtype)
        given: dict[str, Any] = {}
        schemes: dict[str, Scheme] = {}
        turned: dict[str, Orientation] = {}
        for name, tensor in tensors.items():
            if name.endswith("_bias"):
                own = tensor.dtype if tensor.dtype == torch.float32 else dtype
                given[name] = View(tensor.detach().to(own).contiguous())
            elif isinstance(tensor, PackedTensor):
                layout = _put(name, tensor, given, schemes, turned, layout)
            else:
                if tensor.dtype != dtype:
                    raise NotImplementedError(
                        f"moec.transformers: {name} is plain, of {tensor.dtype}, beside packed "
                        f"experts that compute in {dtype}; one type is needed"
                    )
                given[name] = View(tensor.detach().contiguous())
                turned[name] = orientation
        down = tensors["down"]
        hidden, inter = down.shape[1:] if orientation == Orientation.OUT_IN else down.shape[:0:-1]
        first = "up" if "up" in turned else "gate_up"
        self.weights = Weights.of(
            context_of(down.device), gate_layout=layout,
            gate_up_orientation=turned[first], down_orientation=turned["down"],
            scheme=schemes.get(first, Scheme.NONE), down_scheme=schemes.get("down", Scheme.NONE),
            dtype=dtype_of(str(dtype).removeprefix("torch.")), num_experts=down.shape[0],
            hidden=hidden, inter=inter, **given,
        )
        self.enter()

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        return self._marks == _marks(tensors, self._dtype)

    def current(self, tensors: Mapping[str, Tensor | None]) -> Weights:
        """Where biases lie elsewhere than in the forward, as FSDP gathers them, bound anew."""
        moved = {name: tensor.detach() for name, held in self._held.items()
                 if (tensor := tensors.get(name)) is not None
                 and tensor.data_ptr() != held.data_ptr()}
        if not moved:
            return self.weights
        return PackedWeights(self._held | moved, self._dtype, self._spec).weights


def _put(
    name: str, tensor: PackedTensor, given: dict[str, Any], schemes: dict[str, Scheme],
    turned: dict[str, Orientation], layout: GateLayout,
) -> GateLayout:
    """Enter a packed matrix, gate and up apart where they are stored so; the gate layout."""
    coded = tensor.matrices()
    apart = name == "gate_up" and len(coded) == 2
    for role, one in zip(("gate", "up") if apart else (name,), coded, strict=True):
        given[role], given[f"{role}_quant"] = placed(one)
        schemes[role], turned[role] = one.scheme, one.orientation
    return GateLayout.SPLIT if apart else layout


def _marks(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> list[Any]:
    """Where the tensors lie; of what is read once, the counters of changes in place."""
    found: list[Any] = []
    for name, tensor in tensors.items():
        if isinstance(tensor, PackedTensor):
            found += [(n, p.data_ptr(), p._version) for n, p in tensor.parts.items()]
        else:
            copied = name.endswith("_bias") and tensor.dtype not in (torch.float32, dtype)
            copied = copied or not tensor.is_contiguous()
            found.append((name, tensor.data_ptr(), tensor.dtype, tensor._version if copied else 0))
    return found
