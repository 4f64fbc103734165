# SPDX-License-Identifier: Apache-2.0
"""Experts modules of transformers whose matrices are packed, however they hold the codes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..quant_config import Declared
from ..torch._constants import constant, module_of
from ..torch._packed import PackedTensor, Store

STACKS = ("gate_up_proj", "up_proj", "down_proj")
"""parameters of experts modules that can be packed"""
BIASES = tuple(f"{name}_bias" for name in STACKS)
_SCALES = frozenset(f"{name}_scale_inv" for name in (*STACKS, *BIASES))
_NAMES = _SCALES.union(STACKS, BIASES)
_read: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[Any, PackedTensor]]] = (
    weakref.WeakKeyDictionary())


def stored(module: nn.Module, name: str) -> Tensor | None:
    """A module's tensor as it is held: the codes of a parameter that bitsandbytes parametrised,
    and of transformers' FP8Experts."""
    own = vars(module)
    value = own["_parameters"].get(name)
    if isinstance(value, PackedTensor):
        return value
    if value is None:
        if "parametrizations" in own["_modules"]:
            found = _parametrised(module, name)
            if found is not None:
                return found
        value = _attribute(module, name)
        if value is None or isinstance(value, PackedTensor):
            return value  # type: ignore[no-any-return]
    scale = _attribute(module, f"{name}_scale_inv")
    if scale is not None:
        return _once(module, name, (value, scale), lambda: _from_fp8(module, value, scale))
    return value  # type: ignore[no-any-return]


def has_parameters_alone(module: nn.Module) -> bool:
    """Whether what stored() would find, of any of these names, are a module's parameters."""
    own = vars(module)
    return (_SCALES.isdisjoint(own["_parameters"]) and own.keys().isdisjoint(_NAMES)
            and not own["_buffers"] and "parametrizations" not in own["_modules"]
            and not _computes_any(type(module)))


def _parametrised(module: Any, name: str) -> PackedTensor | None:
    """What bitsandbytes parametrised, if it did."""
    lists = module.parametrizations
    chain = lists[name] if name in lists else ()
    state = getattr(chain[0], "quant_state", None) if len(chain) == 1 else None
    if state is None:
        return None
    codes = chain.original
    return _once(module, name, (codes, state),
                 lambda: PackedTensor.from_bnb(codes.detach(), state, in_out=is_in_out(module)))


def _attribute(module: nn.Module, name: str) -> Any:
    """getattr(module, name, None), which for what is not there takes as long as a small layer."""
    own = vars(module)
    for place in (own, own["_parameters"], own["_buffers"]):
        if name in place:
            return place[name]
    return getattr(module, name, None) if _computes(type(module), name) else None


@lru_cache(maxsize=1024)
def _computes(kind: Any, name: str) -> bool:
    """Whether a class has an attribute that no instance holds."""
    return hasattr(kind, name) or kind.__getattr__ is not nn.Module.__getattr__


@lru_cache(maxsize=1024)
def _computes_any(kind: Any) -> bool:
    return any(_computes(kind, name) for name in _NAMES)


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


@constant
def has_packed(of: nn.Module | int) -> bool:
    """Whether any matrix of an experts module is packed."""
    module = module_of(of)
    return any(isinstance(stored(module, name), PackedTensor) for name in STACKS)
