# SPDX-License-Identifier: Apache-2.0
"""How the library's weights are bound to a module's packed matrices, which calls find by number."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from .._enums import GateLayout, Orientation, Scheme
from .._spec import Spec
from .._tensors import dtype_of, kind_of
from .._weights import MATRICES, Weights
from ._codes import View
from ._constants import constant, module_of
from ._engine import context_of
from ._frozen import Numbered
from ._packed import PackedTensor, placed
from ._structs import has_autocast

_bound: weakref.WeakKeyDictionary[nn.Module, dict[torch.dtype, PackedWeights]] = (
    weakref.WeakKeyDictionary())
_lock = threading.Lock()
_version_of = attrgetter("_version")


def packed_weights(
    module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype, spec: Callable[[], Spec],
) -> PackedWeights:
    """The library's weights over a module's tensors, some of them packed, for values of a type;
    `number` names them in a call. spec: makes what says how the tensors lie."""
    held = _bound.setdefault(module, {})
    found = held.get(dtype)
    if found is None or not found.fits(tensors):
        with _lock:  # one thread binds: a number that another one replaces would end
            found = held.get(dtype)
            if found is None or not found.fits(tensors):
                found = held[dtype] = PackedWeights(tensors, dtype, spec())
    return found


def put_packed(module: nn.Module, names: Mapping[str, str], name: str, matrix: Any, device: Any
               ) -> None:
    """A packed stack in the place of a module's plain matrix; names: of the parameters."""
    if not isinstance(matrix, PackedTensor):
        raise TypeError(
            f"moec.torch: packed[{name!r}] is {kind_of(matrix)}; a PackedTensor is needed")
    held = module._parameters.get(names.get(name, "")) if name in MATRICES else None
    if held is None:
        own = ", ".join(n for n in MATRICES if module._parameters.get(names[n]) is not None)
        raise ValueError(f"moec.torch: packed has {name!r}; the module has {own}")
    if held.shape != matrix.shape:
        raise ValueError(f"moec.torch: packed[{name!r}] is of {list(matrix.shape)}; "
                         f"{list(held.shape)} is needed")
    own_matrix = matrix.detach() if device is None else matrix.detach().to(device)
    module._parameters[names[name]] = nn.Parameter(own_matrix, requires_grad=False)


@constant
def _number(of: nn.Module | int, dtype: torch.dtype, is_traced: bool) -> int:
    module: Any = module_of(of)
    found = packed_weights(module, module._matrices(), dtype, lambda: module._spec)
    if is_traced:
        found.watch(module, lambda one: one._matrices())
    return found.number


def packed_number(of: nn.Module | int, x: Tensor | None) -> int:
    """The number of the weights of a module of moec.torch, bound for values of the type of x in the
    call: autocast's where that is on."""
    assert x is not None
    on = has_autocast(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if on else x.dtype
    return _number(of, dtype, torch.compiler.is_compiling())


class PackedWeights(Numbered):
    """Weights over a module's codes, plain matrices and biases, which each call reads."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, spec: Spec) -> None:
        layout, orientation = spec.gate_layout, spec.down_orientation
        self._now: Callable[[], Mapping[str, Tensor] | None] = lambda: None
        self._spec, self._held = spec, {n: t.detach() for n, t in tensors.items()}
        self._dtype, self._marks, self._codes = dtype, _marks(tensors, dtype), _codes(tensors)
        # As they are bound: FSDP gives a tensor other memory.
        self._addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()
                           if not isinstance(tensor, PackedTensor)}
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
                        f"moec: {name} is plain, of {tensor.dtype}, beside packed "
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

    def watch(self, module: nn.Module, tensors: Callable[[Any], Mapping[str, Tensor]]) -> None:
        """Let calls look whether the module has these codes still: a graph keeps the number."""
        held = weakref.ref(module)
        self._now = lambda: None if (one := held()) is None else tensors(one)

    def current(self, tensors: Mapping[str, Tensor | None]) -> Weights:
        """Where biases lie elsewhere than in the forward, as FSDP gathers them, bound anew."""
        now = self._now()
        if now is not None and _codes(now) != self._codes:
            raise RuntimeError(
                "moec.torch: packed matrices were moved or changed after this graph was made; "
                "compile again"
            )
        moved = {name: tensor.detach() for name, address in self._addresses.items()
                 if (tensor := tensors.get(name)) is not None and tensor.data_ptr() != address}
        if not moved:
            return self.weights
        return PackedWeights(self._held | moved, self._dtype, self._spec).weights


def _codes(tensors: Mapping[str, Tensor]) -> list[Any]:
    """Where the packed ones of them lie, and the counters of their changes in place."""
    found: list[Any] = []
    for name, tensor in tensors.items():
        if isinstance(tensor, PackedTensor):
            parts = tensor.parts.values()
            found += (name, tensor.store, *map(Tensor.data_ptr, parts), *map(_version_of, parts))
    return found


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
    found = _codes(tensors)
    for name, tensor in tensors.items():
        if not isinstance(tensor, PackedTensor):
            copied = name.endswith("_bias") and tensor.dtype not in (torch.float32, dtype)
            copied = copied or not tensor.is_contiguous()
            found.append((name, tensor.data_ptr(), tensor.dtype, tensor._version if copied else 0))
    return found
