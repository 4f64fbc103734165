# SPDX-License-Identifier: Apache-2.0
"""The owner of a C handle: closed once, by name, by `with`, or by the garbage collector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

from ._errors import wrong_state
from ._tensors import kind_of


class Handle:
    """Base of everything that owns a handle. Handles may be closed in any order: the library
    keeps a child's parents alive."""

    # The C function itself: a Python one may be torn down before the last object at exit.
    _free: ClassVar[Callable[[Any], None]]
    _pointer: Any = None

    @property
    def raw(self) -> Any:
        """The low-level handle; raises StateError after close()."""
        if self._pointer is None:
            raise wrong_state(type(self).__name__, "already closed")
        return self._pointer

    def close(self) -> None:
        """Free the handle now; further calls do nothing."""
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            type(self)._free(pointer)

    def __reduce__(self) -> Any:
        """What copy, deepcopy and pickle ask: a second owner would free the handle again."""
        kind = type(self).__name__
        raise TypeError(f"moec: a {kind} owns a handle; it cannot be copied or pickled")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def need(name: str, value: Any, kind: type) -> Any:
    """The value of an argument. Raises TypeError when it is of another kind."""
    if not isinstance(value, kind):
        raise TypeError(f"moec: {name} is {kind_of(value)}; a moec.{kind.__name__} is needed")
    return value


def handle_of(name: str, value: Any, kind: type[Handle]) -> Any:
    """The low-level handle of an argument. Raises TypeError when it is of another kind."""
    return need(name, value, kind).raw
