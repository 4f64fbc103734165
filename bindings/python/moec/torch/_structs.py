# SPDX-License-Identifier: Apache-2.0
"""Structs of moec.h from torch tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _raw
from .._enums import DeviceType, DType
from .._weights import MATRICES
from ._layouts import stored

_core = _raw._core
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_IDS = (torch.int32, torch.int64)
_MASKS = (torch.uint8, torch.bool)
_INTEGERS = {"expert_ids": _IDS, "table": _IDS, "token_ids": _IDS, "given_ids": _IDS,
             "token_mask": _MASKS}
_CODES = {
    torch.float32: DType.F32, torch.float16: DType.F16, torch.bfloat16: DType.BF16,
    torch.int32: DType.I32, torch.int64: DType.I64, torch.uint8: DType.U8, torch.bool: DType.BOOL,
}
DEVICES = {"cpu": DeviceType.CPU, "cuda": DeviceType.CUDA}

Tensors = Mapping[str, Tensor]
"""argument name -> contiguous tensor"""


def code_of(dtype: torch.dtype, name: str, within: Collection[torch.dtype] = _CODES) -> DType:
    """DType of the dtype of tensor `name`. Raises TypeError, naming it, for one of no use."""
    if dtype not in within:
        kinds = ", ".join(str(kind) for kind in _INTEGERS.get(name, FLOATS))
        raise TypeError(f"moec.torch: {name} is of {dtype}; {kinds} can be used")
    return _CODES[dtype]


def has_autocast(device: str) -> bool:
    """Whether autocast is on for a type of device; torch raises for those that have none."""
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


class _Places(dict[torch.device, int]):
    """device -> device_type << 32 | device_id of moec.h"""

    def __missing__(self, device: torch.device) -> int:
        self[device] = found = DEVICES[device.type] << 32 | (device.index or 0)
        return found


_places = _Places()
@lru_cache(maxsize=1024)
def offset_of(kind: str, *path: str) -> int:
    """Bytes from the start of a struct to a field, or to a field of a field."""
    inner = whole = getattr(_core, f"new_{kind}")()
    *parents, last = path
    for field in parents:
        inner = getattr(_core, f"{kind}_{field}_get")(inner)
        kind = type(inner).__name__
    begin = int(getattr(inner, "this", inner)) - int(whole)
    at: int | None = getattr(_core, f"{kind}_{last}_at", None)
    if at is not None:
        return begin + at
    return int(getattr(_core, f"{kind}_{last}_get")(inner).this) - int(whole)


class Frame(NamedTuple):
    """What calls of one kind have in common: a struct's bytes, and what is put where."""

    pattern: bytes
    tensors: tuple[int, ...]
    """offsets of tensors"""
    words: tuple[int, ...] = ()
    """offsets of words of 64 bits: handles, addresses and their like"""

    def fill(self, tensors: Tensors, words: Iterable[int] = (), prefix: str = "") -> Any:
        """The struct of a call, from contiguous tensors. Raises TypeError for a dtype of no use,
        naming prefix + name."""
        try:
            return _core.new_call_args(self.pattern, self.tensors, tuple(tensors.values()),
                                       self.words, tuple(words), _CODES, _places)
        except KeyError:
            for name, tensor in tensors.items():
                code_of(tensor.dtype, prefix + name.removesuffix(".data").replace(".", "_"))
            raise


@lru_cache(maxsize=1024)
def frame(kind: str, tensors: tuple[str, ...], words: tuple[str, ...], flags: int = 0) -> Frame:
    """A frame of a struct of moec.h, with tensors and words in fields such as "saved.ptr"."""
    raw = getattr(_core, f"new_{kind}")()
    if flags:
        getattr(_core, f"{kind}_flags_set")(raw, flags)
    size = getattr(_core, f"{kind}_struct_size_get", lambda _: _raw.topk_bytes)(raw)
    return Frame(
        ctypes.string_at(int(raw), size),
        *(tuple(offset_of(kind, *name.split(".")) for name in names) for names in (tensors, words)),
    )


def filled(kind: str, tensors: Tensors, words: Mapping[str, int], flags: int = 0) -> Any:
    """A struct of moec.h with tensors and words by the names of their fields."""
    return frame(kind, tuple(tensors), tuple(words), flags).fill(tensors, words.values())


def buffer(field: str, memory: Tensor) -> dict[str, int]:
    """The words of a moec_buffer."""
    return {f"{field}.ptr": memory.data_ptr(), f"{field}.bytes": memory.numel()}


def weight_set(given: Mapping[str, Tensor | None], keep: list[Any], prefix: str = "") -> Any:
    """moec_weight_set of matrices that can be read in place (_layouts); messages name its tensors
    with the prefix. What must outlive its use is appended to `keep`."""
    tensors: dict[str, Tensor] = {}
    words: dict[str, int] = {}
    for name in MATRICES:
        data, bias = given.get(name), given.get(f"{name}_bias")
        if data is not None:
            data = stored(data)
            if data.is_contiguous():
                tensors[f"{name}.data"] = data
            else:  # each expert where it lies
                items = {f"{name}[{index}]": one for index, one in enumerate(data)}
                size = _raw.tensor_bytes
                at = tuple(range(0, size * len(items), size))
                keep.append(Frame(bytes(size * len(items)), at).fill(items, prefix=prefix))
                words |= {f"{name}.per_expert": int(keep[-1]), f"{name}.count": len(items)}
        if bias is not None:
            tensors[f"{name}.bias"] = bias
    made = frame("moec_weight_set", tuple(tensors), tuple(words))
    keep.append(made.fill(tensors, words.values(), prefix))
    return keep[-1]
