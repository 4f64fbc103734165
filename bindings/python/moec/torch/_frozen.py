# SPDX-License-Identifier: Apache-2.0
"""Bound weights that calls find by number, and those that are declared not to change."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

from .._spec import ROUTED_WEIGHTS, Spec
from .._weights import WEIGHTS, Weights, WeightSet
from ._engine import bind, context_of, current_stream
from ._structs import Tensors


class Numbered:
    """Bound weights that a call finds by number, since a graph cannot carry an object."""

    weights: Weights
    number: int
    _numbers = itertools.count(1)
    _all: weakref.WeakValueDictionary[int, Numbered] = weakref.WeakValueDictionary()

    def enter(self) -> None:
        self.number = next(self._numbers)
        self._all[self.number] = self

    def current(self, tensors: Tensors) -> Weights:
        """The weights for a call of these tensors. Raises RuntimeError when they lie elsewhere."""
        raise NotImplementedError

    @staticmethod
    def of(number: int, tensors: Tensors) -> Weights | None:
        """The weights of a number, read again when they changed in place. Raises when the tensors
        lie elsewhere by now."""
        if not number:
            return None
        found = Numbered._all.get(number)
        if found is None:
            raise RuntimeError(
                f"moec.torch: frozen weights {number} exist no more; compile again what was "
                "compiled with them"
            )
        return found.current(tensors)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of a module, or a saved one, is not frozen


class Frozen(Numbered):
    """Packed weights that are declared not to change until refresh(). A change that torch's version
    counters show is read by the next call."""

    def __init__(self, spec: Spec, given: Tensors) -> None:
        down = given["down"]
        assert down is not None
        context = context_of(down.device)
        names = dict(zip(WEIGHTS, ROUTED_WEIGHTS, strict=True))
        self.tensors = {names[f]: t for f, t in given.items() if t is not None}
        self.weights = bind(context, given, spec.gate_layout, spec.gate_up_orientation,
                            spec.down_orientation, frozen=True)
        self.weights.set = WeightSet()
        self._lock = threading.Lock()
        self._read = self._versions()
        if self.weights.info().packed_bytes:
            self.weights.pack(stream=current_stream(down))
        self.enter()

    def current(self, tensors: Tensors) -> Weights:
        for name, held in self.tensors.items():
            now = tensors.get(name)
            if now is not None and now.dtype != held.dtype:
                raise RuntimeError(
                    f"moec.torch: {name} was frozen in {held.dtype} and is {now.dtype} in this "
                    "call, by .to() or by an autocast of 16-bit types; freeze() after converting "
                    "the module"
                )
            if now is None or now.data_ptr() != held.data_ptr():
                raise RuntimeError(
                    f"moec.torch: {name} was frozen at another address; call freeze() again"
                )
        if self._read != self._versions():
            self.refresh()
        return self.weights

    def _versions(self) -> list[int | None]:
        """Counters of the changes in place; tensors made in inference mode have none."""
        return [None if t.is_inference() else t._version for t in self.tensors.values()]

    def refresh(self) -> None:
        """Read the values again, where a packed copy of them is kept: not on CUDA."""
        with self._lock:
            self._read = self._versions()
            if self.weights.info().is_packed:
                self.weights.refresh(stream=current_stream(self.tensors["down"]))
