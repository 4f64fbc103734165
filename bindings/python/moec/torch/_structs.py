# SPDX-License-Identifier: Apache-2.0
"""Structs of moec.h from torch tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

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

Tensors = Mapping[str, Tensor | None]
"""argument name -> contiguous tensor, None or missing where absent"""


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
Form = tuple[tuple[int, ...], tuple[int, ...]]
"""(shape, strides) of a view"""


@lru_cache(maxsize=1024)
def offset_of(kind: str, *path: str) -> int:
    """Bytes from the start of a struct to a field, or to a field of a field."""
    inner = whole = getattr(_core, f"new_{kind}")()
    for field in path:
        inner = getattr(_core, f"{kind}_{field}_get")(inner)
        kind = type(inner).__name__
    return int(inner.this) - int(whole)


def put_at(
    address: int, offsets: Sequence[int], tensors: Sequence[Tensor | None], names: Sequence[str],
    forms: Sequence[Form] | None = None,
) -> None:
    """Write moec_tensors of contiguous tensors, or of other views (forms) of their memory, to an
    address and further ones. Raises TypeError, naming it, for a dtype of no use."""
    try:
        _core.put_tensors(address, tuple(offsets), tuple(tensors), _CODES, _places,
                          None if forms is None else tuple(forms))
    except KeyError:
        for tensor, name in zip(tensors, names, strict=True):
            if tensor is not None:
                code_of(tensor.dtype, name)
        raise


class Struct:
    """A struct of moec.h, set by SWIG's functions: assigning to its proxies takes four times as
    long."""

    def __init__(self, kind: str) -> None:
        self.kind, self.raw = kind, getattr(_core, f"new_{kind}")()

    def set(self, field: str, value: Any) -> None:
        getattr(_core, f"{self.kind}_{field}_set")(self.raw, value)

    def put(self, tensors: Tensors, prefix: str = "") -> None:
        """The tensors given by their fields' names without the prefix."""
        kind, names = self.kind, [prefix + name for name in tensors]
        put_at(int(self.raw), [offset_of(kind, name) for name in names], tensors.values(), names)


def view(tensor: Tensor, name: str) -> Any:
    raw = _core.new_moec_tensor()
    put_at(int(raw), (0,), (tensor,), (name,))
    return raw


def weight_set(given: Tensors, keep: list[Any], prefix: str = "") -> Any:
    """moec_weight_set of matrices that can be read in place (_layouts); messages name its tensors
    with the prefix. What must outlive its use is appended to `keep`."""
    found = Struct("moec_weight_set")
    for name in MATRICES:
        data, bias = given.get(name), given.get(f"{name}_bias")
        if data is not None or bias is not None:
            matrix = Struct("moec_matrix")
            if data is not None:
                _put_matrix(matrix, stored(data), prefix + name, keep)
            if bias is not None:
                matrix.set("bias", view(bias, f"{prefix}{name}_bias"))
            found.set(name, matrix.raw)
    keep.append(found.raw)
    return found.raw


def _put_matrix(matrix: Struct, data: Tensor, name: str, keep: list[Any]) -> None:
    """All experts as one tensor, or each where it lies."""
    if data.is_contiguous():
        matrix.set("data", view(data, name))
        return
    items = _raw.tensor_array(len(data))
    for index, one in enumerate(data):
        items[index] = view(one, f"{name}[{index}]")
    matrix.set("per_expert", items.cast())
    matrix.set("count", len(data))
    keep.append(items)


def buffer(tensor: Tensor) -> Any:
    raw = Struct("moec_buffer")
    raw.set("ptr", tensor.data_ptr())
    raw.set("bytes", tensor.numel())
    return raw.raw
