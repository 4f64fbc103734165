# SPDX-License-Identifier: Apache-2.0
"""Structs of moec.h from torch tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _raw
from .._enums import DeviceType, DType
from .._weights import MATRICES

_core = _raw._core
_CODES = {
    torch.float32: DType.F32, torch.float16: DType.F16, torch.bfloat16: DType.BF16,
    torch.int32: DType.I32, torch.int64: DType.I64, torch.uint8: DType.U8, torch.bool: DType.BOOL,
}
DEVICES = {"cpu": DeviceType.CPU, "cuda": DeviceType.CUDA}

Tensors = Mapping[str, Tensor | None]
"""argument name -> contiguous tensor, None or missing where absent"""


def code_of(dtype: torch.dtype) -> DType:
    """DType of a torch dtype."""
    try:
        return _CODES[dtype]
    except KeyError:
        raise TypeError(f"moec.torch: {dtype} is not an element type of moec") from None


class Struct:
    """A struct of moec.h, set by SWIG's functions: assigning to its proxies takes four times as
    long."""

    def __init__(self, kind: str) -> None:
        self.kind, self.raw = kind, getattr(_core, f"new_{kind}")()

    def set(self, field: str, value: Any) -> None:
        getattr(_core, f"{self.kind}_{field}_set")(self.raw, value)

    def put(self, tensors: Tensors, prefix: str = "") -> None:
        """The tensors given by their fields' names without the prefix."""
        for name, tensor in tensors.items():
            if tensor is not None:
                self.set(prefix + name, view(tensor))


def view(tensor: Tensor) -> Any:
    raw = _core.new_moec_tensor()
    device = tensor.device
    _core.tensor_from_parts(raw, tensor.data_ptr(), code_of(tensor.dtype), DEVICES[device.type],
                            device.index or 0, tuple(tensor.shape))
    return raw


def weight_set(given: Tensors) -> Any:
    found = Struct("moec_weight_set")
    for name in MATRICES:
        data, bias = given.get(name), given.get(f"{name}_bias")
        if data is not None or bias is not None:
            matrix = Struct("moec_matrix")
            matrix.put({"data": data, "bias": bias})
            found.set(name, matrix.raw)
    return found.raw


def buffer(tensor: Tensor) -> Any:
    raw = Struct("moec_buffer")
    raw.set("ptr", tensor.data_ptr())
    raw.set("bytes", tensor.numel())
    return raw.raw
