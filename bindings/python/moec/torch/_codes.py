# SPDX-License-Identifier: Apache-2.0
"""Experts of codes in a module: a checkpoint's tensors as frozen parameters, under whose names
state_dict() has them. Tensors of one name in every expert are one parameter [E,...]."""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from .. import _raw
from .._tensors import Described, dtype_of
from .._weights import Weights
from .._descriptors import ExpertsDesc
from ..matrices import Matrices
from ._constants import constant, module_of
from ._engine import context_of, current_stream
from ._frozen import Numbered
from ._structs import DEVICES, has_autocast

_EXPERT = re.compile(r"^\d+(?=\.)")


class View(Described):
    """A torch tensor of any type, read where it lies."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.shape = tensor, tuple(tensor.shape)
        self.dtype = str(tensor.dtype).removeprefix("torch.")

    def describe(self, raw: Any) -> None:
        device = self.tensor.device
        _raw._core.tensor_from_parts(raw, self.tensor.data_ptr(), dtype_of(self.dtype),
                                     DEVICES[device.type], device.index or 0, self.shape)


def _view(tensor: Any) -> View:
    return View(tensor.detach().contiguous())


class Codes:
    """What a module knows of its codes beside the parameters: their names in a checkpoint."""

    def __init__(self, made: Matrices, prefix: str) -> None:
        if made.published is None or not made.is_coded:
            raise TypeError(
                "moec.torch: codes are what moec.read_experts() makes of a quantised checkpoint's "
                "tensors"
            )
        self.prefix = prefix
        self.count, self.hidden = made.count, made.hidden
        self.kinds = made.kinds
        self.recipe = replace(made.published, tensors={})
        self.names: dict[str, list[str]] = {}
        """parameter -> tensor names, one or one an expert"""
        self.stacks: set[str] = set()
        """the parameters [E,...]"""
        self.types: dict[str, torch.dtype] = {}
        self.bound: dict[torch.dtype, Bound] = {}

    def parameters(self, tensors: Mapping[str, Any], device: Any) -> dict[str, nn.Parameter]:
        """The parameters of a checkpoint's tensors; NumPy arrays are copied."""
        groups: dict[str, list[str]] = {}
        for name in tensors:
            groups.setdefault(_EXPERT.sub("{e}", name), []).append(name)
        made: dict[str, nn.Parameter] = {}
        for pattern, names in groups.items():
            found = [_tensor(tensors[name]) for name in _in_order(names)]
            if len({tensor.shape for tensor in found}) > 1:  # texts of other lengths
                made |= {self._put(name, [name]): _frozen(tensor, device)
                         for name, tensor in zip(_in_order(names), found, strict=True)}
            elif "{e}" in pattern:
                parameter = self._put(pattern, _in_order(names))
                self.stacks.add(parameter)
                made[parameter] = _frozen(torch.stack(found), device)
            else:
                made[self._put(pattern, names)] = _frozen(found[0], device)
        self.types = {name: parameter.dtype for name, parameter in made.items()}
        return made

    def _put(self, pattern: str, names: list[str]) -> str:
        parameter = pattern.replace("{e}.", "").replace(".", "_")
        parameter = f"expert_{parameter}" if parameter[0].isdigit() else parameter
        assert parameter not in self.names
        self.names[parameter] = names
        return parameter

    def published(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The checkpoint's tensors, as views of the parameters; what is sharded over processes is
        one tensor under the parameter's name."""
        found: dict[str, Any] = {}
        for name, names in self.names.items():
            value = parameters[name]
            if name not in self.stacks:
                found[names[0]] = value
            elif type(value) in (Tensor, nn.Parameter):
                found |= zip(names, value, strict=True)
            else:
                found[name] = value
        return found

    def gather(
        self, state: dict[str, Any], prefix: str, own: Mapping[str, Any], missing: list[str],
        errors: list[str],
    ) -> None:
        """Replace a checkpoint's tensors in a state_dict by the parameters that they make."""
        for name, names in self.names.items():
            keys = [prefix + self.prefix + one for one in names]
            whole = prefix + self.prefix + name
            if name in self.stacks and whole in state:
                keys = [whole]
            absent = [key for key in keys if key not in state]
            found = [state.pop(key) for key in keys if key in state]
            if absent:
                missing += absent
                continue
            wrong = next((i for i, t in enumerate(found) if t.dtype != own[name].dtype), None)
            if wrong is not None:
                errors.append(f"{keys[wrong]} is of {found[wrong].dtype}; {own[name].dtype} is "
                              "expected, and no value of codes may be converted")
                continue
            split = name in self.stacks and keys[0] != whole
            state[prefix + name] = torch.stack(found) if split else found[0]

    def number(self, module: nn.Module, dtype: torch.dtype, pack: bool) -> int:
        """The number of the weights bound to a module's parameters, for values of a type."""
        held = {name: module._parameters[name] for name in self.names}
        found = self.bound.get(dtype)
        if found is None or found.is_packed != pack or not found.fits(held):
            found = self.bound[dtype] = Bound(self, module, held, dtype, pack)
        return found.number

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"bound": {}}  # a copy binds its own tensors


class Bound(Numbered):
    """Weights over a module's parameters, for one type of values."""

    def __init__(
        self, codes: Codes, module: nn.Module, held: Mapping[str, Any], dtype: torch.dtype,
        pack: bool,
    ) -> None:
        self.is_packed = pack
        self._codes, self._module = codes, weakref.ref(module)
        self._marks = _marks(held)
        down = next(iter(held.values()))
        made = codes.recipe.read_again(codes.published(held), codes.count, codes.hidden)
        self.weights = made.weights(context_of(down.device), frozen=pack, dtype=dtype_of(dtype),
                                    placed=_view)
        if pack and down.device.type == "cpu":  # the module holds its parameters anyway
            self.weights.pack(stream=current_stream(down))
        self.enter()

    def fits(self, held: Mapping[str, Any]) -> bool:
        return self._marks == _marks(held)

    def current(self, tensors: Mapping[str, Tensor | None]) -> Weights:
        module = self._module()
        if module is None or not self.fits({n: module._parameters[n] for n in self._codes.names}):
            raise RuntimeError(
                "moec.torch: the codes were moved or changed after this graph was made; compile "
                "again"
            )
        return self.weights


def _marks(held: Mapping[str, Any]) -> list[tuple[int, int | None]]:
    """Where the parameters lie, and the counters of their changes in place."""
    return [(t.data_ptr(), None if t.is_inference() else t._version) for t in held.values()]


def _in_order(names: list[str]) -> list[str]:
    numbers = (_EXPERT.match(name) for name in names)
    keyed = zip((int(m[0]) if m else 0 for m in numbers), itertools.count(), names, strict=False)
    return [name for *_, name in sorted(keyed)]


def _tensor(value: Any) -> Tensor:
    """A torch tensor of a tensor or a NumPy array, of any type of codes."""
    if isinstance(value, Tensor):
        return value.detach()
    if value.dtype.isbuiltin == 1:
        return torch.tensor(value)
    of = getattr(torch, value.dtype.name)  # of ml_dtypes, which torch does not know
    return torch.tensor(value.reshape(-1).view("uint8")).view(of).reshape(value.shape)


def _frozen(tensor: Tensor, device: Any) -> nn.Parameter:
    return nn.Parameter(tensor.to(device).contiguous(), requires_grad=False)


class CodedModule(nn.Module):
    """What modules of experts do with codes, where they have any."""

    desc: ExpertsDesc
    _codes: Codes | None = None
    _pack = False

    def _hold(self, codes: Matrices, device: Any, prefix: str) -> None:
        """Codes as frozen parameters."""
        sizes = {"num_experts": codes.count, "hidden": codes.hidden, "inter": codes.inter}
        for name, size in sizes.items():
            if getattr(self.desc, name) != size:
                raise ValueError(
                    f"moec.torch: {name} is {getattr(self.desc, name)}; the codes have {size}"
                )
        self._codes = Codes(codes, prefix)
        assert codes.published is not None
        made = self._codes.parameters(codes.published.tensors, device)
        for name, parameter in made.items():
            self.register_parameter(name, parameter)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Codes and scales move to other devices and keep their types."""
        base = partial(super()._apply, recurse=recurse)
        if self._codes is None:
            base(fn)
        else:
            apply(self, self._codes, fn, base)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._codes is not None:
            own = {name: destination.pop(prefix + name) for name in self._codes.names}
            for name, value in self._codes.published(own).items():
                destination[prefix + self._codes.prefix + name] = value

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        if self._codes is None:
            return super()._load_from_state_dict(state_dict, prefix, *more)
        _, _, missing, _, errors = more
        absent, before = list[str](), len(missing)
        self._codes.gather(state_dict, prefix, self._parameters, absent, errors)
        super()._load_from_state_dict(state_dict, prefix, *more)
        own = {prefix + name for name in self._codes.names}  # they are missing by their tensors'
        missing[before:] = [key for key in missing[before:] if key not in own] + absent

    def __getstate__(self) -> dict[str, Any]:
        """Codes in 8-bit floats as bytes: pickle cannot store torch's."""
        state = dict(self.__dict__)
        if self._codes is not None:
            state["_parameters"] = {
                name: _frozen(value.detach().view(torch.uint8), None)
                if name in self._codes.names and value.is_floating_point() and value.itemsize == 1
                else value for name, value in self._parameters.items() if value is not None
            } | {name: None for name, value in self._parameters.items() if value is None}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name, dtype in () if self._codes is None else self._codes.types.items():
            held = self._parameters[name]
            if held is not None and held.dtype != dtype:
                self._parameters[name] = _frozen(held.detach().view(dtype), None)


@constant
def _number(of: nn.Module | int, dtype: torch.dtype) -> int:
    module: Any = module_of(of)
    return int(module._codes.number(module, dtype, module._pack))


def number(of: nn.Module | int, x: Tensor | None) -> int:
    """The number of a module's codes, bound for values of the type of x in the call: autocast's
    where that is on."""
    assert x is not None
    on = has_autocast(x.device.type)
    return _number(of, torch.get_autocast_dtype(x.device.type) if on else x.dtype)


def apply(module: nn.Module, codes: Codes, fn: Callable[[Tensor], Tensor], base: Any) -> None:
    """nn.Module._apply(fn), in which codes and scales move and keep their types."""
    held = {name: module._parameters.pop(name) for name in codes.names}
    try:
        base(fn)
    finally:
        module._parameters.update(held)
    for name, old in held.items():
        assert old is not None
        probe = fn(old.new_empty((0,)))
        new = fn(old) if probe.dtype == old.dtype else old.to(probe.device)
        if new is not old:
            module._parameters[name] = nn.Parameter(new.detach(), requires_grad=False)
