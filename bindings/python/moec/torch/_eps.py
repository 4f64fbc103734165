# SPDX-License-Identifier: Apache-2.0
"""moec.EP as modules of torch hold it: found by number, since a graph cannot carry an object."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _raw
from .._enums import DType
from .._ep import EP as _EP, Comm, EpDesc, memory_at

_TORCH = {DType.F32: torch.float32, DType.F16: torch.float16, DType.BF16: torch.bfloat16,
          DType.I32: torch.int32}


class EP(_EP):
    """moec.EP for modules of moec.torch: Experts(..., ep=ep) and MoELayer(..., ep=ep). Many modules
    of one shape may share it. comm: that of comm(group)."""

    _numbers = itertools.count(1)
    _all: weakref.WeakValueDictionary[int, EP] = weakref.WeakValueDictionary()

    def __init__(
        self, comm: Comm, desc: EpDesc, expert_begin: Sequence[int] | None = None
    ) -> None:
        super().__init__(comm, desc, expert_begin)
        self.number = next(self._numbers)
        self._all[self.number] = self
        self.engines: dict[Any, Any] = {}
        self.route: Route | None = None
        self.partial = torch.empty(0)

    @staticmethod
    def of(number: int) -> EP:
        found = EP._all.get(number)
        if found is None:
            raise RuntimeError(f"moec.torch: the ep {number} of a layer exists no more; keep it")
        return found

    @property
    def scale(self) -> float:
        """What gradients of experts are multiplied by."""
        return self.desc.grad_scale or 1.0

    def send(self, route: Route, x: Tensor) -> Any:
        """Dispatch the tokens of a route; the struct of views."""
        stream = torch.cuda.current_stream(x.device) if x.is_cuda else None
        views = self.dispatch_raw(x, route.ids, route.weights, bound=route.bound, stream=stream)
        self.route, self.partial = route, view_of(views.partial)
        return views


class Route:
    """Which tokens went where: what the backward sends again."""

    def __init__(self, ids: Tensor, weights: Tensor, bound: int) -> None:
        self.ids, self.weights, self.bound = ids, weights, bound


class _Bytes:
    """Memory of a GPU as torch takes it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def view_of(raw: Any) -> Tensor:
    """A view of the library's memory [n,m], until the next dispatch."""
    address, code, kind, index, shape = _raw.tensor_describe(raw)
    device = torch.device("cpu") if kind == _raw.MOEC_CPU else torch.device("cuda", index)
    dtype = _TORCH[DType(code)]
    count = shape[0] * shape[1]
    if not count:
        return torch.empty(shape, dtype=dtype, device=device)
    num_bytes = count * dtype.itemsize
    if device.type == "cuda":
        return torch.as_tensor(_Bytes(address, num_bytes), device=device).view(dtype).view(shape)
    return torch.frombuffer(memory_at(address, num_bytes), dtype=dtype).view(shape)
