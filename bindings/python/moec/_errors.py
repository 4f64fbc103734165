# SPDX-License-Identifier: Apache-2.0
"""The library's failures as exceptions, in the library's own words."""

from __future__ import annotations

import re
from typing import Any

from . import _raw


class MoecError(Exception):
    """A call that the library refused. ``str(error)`` is the library's message, followed by what
    helps in Python where the library cannot know it.

    code         moec_status value, negative
    name         its name, such as ``MOEC_E_SHAPE``
    site         entry point that failed
    native_code  cudaError_t, errno or a callback's value; 0 if none
    argument     1-based argument of the C function, 0 = not one argument
    """

    def __init__(
        self, code: int, native_code: int, argument: int, name: str, site: str, message: str
    ) -> None:
        super().__init__(message or f"{name} without a message")
        self.code = code
        self.native_code = native_code
        self.argument = argument
        self.name = name
        self.site = site

    def __reduce__(self) -> Any:
        return type(self), (self.code, self.native_code, self.argument, self.name, self.site,
                            str(self))


class InvalidArgumentError(MoecError, ValueError):
    """A value out of range, missing, or in conflict with another."""


class ShapeError(InvalidArgumentError):
    """A tensor's shape does not fit."""


class DTypeError(MoecError, TypeError):
    """A tensor's element type does not fit."""


class LayoutError(InvalidArgumentError):
    """Strides that are not supported; compact row-major arrays are."""


class AliasError(InvalidArgumentError):
    """An output overlaps an input."""


class MismatchError(InvalidArgumentError):
    """Plan, saved state or weights of another shape, type or range."""


class CorruptError(InvalidArgumentError):
    """A saved plan or packed file fails its checksum or version."""


class IndexOverflowError(MoecError, OverflowError):
    """T*K, rows or bytes exceed the index type."""


class UnsupportedError(MoecError, NotImplementedError):
    """A legal request that is not implemented; the message says what is."""


class OutOfMemoryError(MoecError, MemoryError):
    """An allocation failed."""


class StateError(MoecError, RuntimeError):
    """Plan not built, weights not bound, or a handle used after fork()."""


class DeviceError(MoecError, RuntimeError):
    """Wrong device, missing backend, or a failure that the driver reported."""


_ON_THE_HOST = re.compile(r" is on cpu; expected cuda:[0-9]+$")

_BY_CODE: dict[int, type[MoecError]] = {
    _raw.MOEC_E_INVALID_ARG: InvalidArgumentError,
    _raw.MOEC_E_INVALID_STATE: StateError,
    _raw.MOEC_E_SHAPE: ShapeError,
    _raw.MOEC_E_DTYPE: DTypeError,
    _raw.MOEC_E_LAYOUT: LayoutError,
    _raw.MOEC_E_DEVICE: DeviceError,
    _raw.MOEC_E_UNSUPPORTED: UnsupportedError,
    _raw.MOEC_E_OUT_OF_MEMORY: OutOfMemoryError,
    _raw.MOEC_E_WORKSPACE: InvalidArgumentError,
    _raw.MOEC_E_NO_BACKEND: DeviceError,
    _raw.MOEC_E_BACKEND_ABI: DeviceError,
    _raw.MOEC_E_CUDA: DeviceError,
    _raw.MOEC_E_FORKED: StateError,
    _raw.MOEC_E_OVERFLOW: IndexOverflowError,
    _raw.MOEC_E_ALIAS: AliasError,
    _raw.MOEC_E_MISMATCH: MismatchError,
    _raw.MOEC_E_CORRUPT: CorruptError,
}


def error_of(
    code: int, native_code: int, argument: int, name: str, site: str, message: str
) -> MoecError:
    if code == _raw.MOEC_E_DEVICE and _ON_THE_HOST.search(message):
        message += "; moec.Context.array copies a NumPy array there"
    return _BY_CODE.get(code, MoecError)(code, native_code, argument, name, site, message)


_raw.set_error_factory(error_of)


def wrong_state(site: str, message: str) -> StateError:
    """The error for a call that the C library never sees."""
    return StateError(
        _raw.MOEC_E_INVALID_STATE, 0, 0, "MOEC_E_INVALID_STATE", site, f"{site}: {message}"
    )
