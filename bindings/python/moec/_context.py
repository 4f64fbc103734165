# SPDX-License-Identifier: Apache-2.0
"""Contexts, devices, versions, the log."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from . import _raw
from ._cublaslt import open_cublaslt
from ._enums import ContextFlags, DeviceType, LogLevel, MathMode
from ._handle import Handle, handle_of
from ._tensors import Array, DeviceArray, require, stream_handle


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device (moec_device_info). arch: the instruction set in use, or sm_XX."""

    device_type: DeviceType
    device_id: int
    compute_major: int
    compute_minor: int
    multiprocessors: int
    numa_node: int
    total_bytes: int
    free_bytes: int
    name: str
    backend: str
    arch: str


@dataclass(frozen=True, slots=True)
class Stats:
    """Host counters of a context (moec_stats)."""

    calls: int
    kernel_launches: int
    allocs: int
    host_syncs: int
    workspace_bytes: int
    workspace_peak: int
    flops: int
    ns_route: int
    ns_plan: int
    ns_experts: int
    ns_combine: int
    path_cpu: int
    path_portable: int
    path_sm90: int
    path_few_tokens: int
    path_fallbacks: int
    ep_gather: int
    ep_peer: int
    ep_rows: int
    ep_exact: int
    path_few_rows: int


def version() -> str:
    """Version of the loaded library, such as "0.1.0"."""
    return str(_raw.moec_version_string())


def abi_version() -> int:
    """ABI number of the loaded library."""
    return int(_raw.moec_abi_version())


def check_library() -> None:
    """Refuse a libmoec that this package was not built for: LD_LIBRARY_PATH may bring another."""
    built = _raw.MOEC_VERSION_MAJOR << 22 | _raw.MOEC_VERSION_MINOR << 12 | _raw.MOEC_VERSION_PATCH
    if abi_version() != _raw.MOEC_ABI_VERSION or _raw.moec_version() < built:
        raise ImportError(
            f"moec: the loaded libmoec has version {version()} and ABI {abi_version()}; "
            f"ABI {_raw.MOEC_ABI_VERSION} and at least the package's version are needed"
        )


def build_info() -> dict[str, Any]:
    """Compiler, instruction sets, build id and flags of the loaded library."""
    info: dict[str, Any] = json.loads(_raw.moec_build_info())
    return info


def set_log(
    sink: Callable[[int, str], None] | None, min_level: LogLevel = LogLevel.INFO
) -> None:
    """Send the library's messages to `sink(level, message)`, from any thread; None: silence."""
    _raw.set_log(sink, min_level)


def load_backend(path: str | bytes | os.PathLike[str]) -> None:
    """Load a backend plug-in. DeviceError: cannot be opened, or of another build."""
    _raw.moec_backend_load(path)


def describe_backend(device_type: DeviceType = DeviceType.CUDA) -> dict[str, Any]:
    """Why a backend has no device, and what the CUDA plug-in found (moec_backend_describe).

    state            "ready", "no_plugin", "other_build", "no_driver", "old_driver", "no_device" or
                     "failed"
    devices          how many there are; `why` there is none
    plugin           the plug-in's file
    driver, needs    CUDA versions: what the driver serves, what the plug-in is built for
    dense_products   where cuBLASLt was found, or that kernels of moec multiply in its place

    Only `state` and `devices` are always there. Never raises for what is missing.
    """
    if device_type == DeviceType.CUDA:
        open_cublaslt()
    text = bytearray(_raw.moec_backend_describe(device_type, None))
    _raw.moec_backend_describe(device_type, text)
    found: dict[str, Any] = json.loads(bytes(text).rstrip(b"\0"))
    return found


def _device_info(raw: Any) -> DeviceInfo:
    values = {item.name: getattr(raw, item.name) for item in fields(DeviceInfo)}
    return DeviceInfo(**values | {"device_type": DeviceType(raw.device_type)})


def devices(device_type: DeviceType | None = None) -> list[DeviceInfo]:
    """Devices of one type, or of every type. A missing driver means none, not an error."""
    kinds = [DeviceType.CPU, DeviceType.CUDA] if device_type is None else [device_type]
    found = []
    for kind in kinds:
        for index in range(_raw.moec_device_count(kind)):
            raw = _raw.moec_device_info()
            _raw.moec_device_query(kind, index, raw)
            found.append(_device_info(raw))
    return found


class Context(Handle):
    """A device with its threads and scratch memory. The other objects are made from one.

    Calls read and write arrays of this device in place and copy none: a context of a GPU takes
    DeviceArrays (array() makes one) and arrays of other libraries there, and refuses NumPy's.

    device           "cpu", "cuda" or "cuda:1"
    num_threads      CPU threads; 0 = affinity mask and cgroup quota
    openmp           CPU: work on the threads of the OpenMP runtime that the process has loaded, if
                     there is one. PyTorch's wait for their next work awake: threads of our own
                     would share the cores with them
    workspace_limit  bytes of scratch the context may hold; 0 = no limit

    Raises DeviceError when the device or its backend is absent.
    """

    _free = _raw._core.moec_context_free

    def __init__(
        self,
        device: str = "cpu",
        *,
        num_threads: int = 0,
        openmp: bool = False,
        flags: ContextFlags = ContextFlags.NONE,
        math: MathMode = MathMode.DEFAULT,
        workspace_limit: int = 0,
    ) -> None:
        kind, _, index = str(device).partition(":")
        known = {"cpu": DeviceType.CPU, "cuda": DeviceType.CUDA}
        if kind not in known or not (index or "0").isdecimal():
            raise ValueError(f'moec.Context: device {device!r}; "cpu", "cuda" and "cuda:N" exist')
        if known[kind] == DeviceType.CUDA:
            open_cublaslt()
        desc = _raw.moec_context_desc()
        self.device_type, self.device_id = known[kind], int(index or 0)
        desc.device_type, desc.device_id = self.device_type, self.device_id
        desc.flags = flags
        desc.math = math
        if num_threads < 0 or not openmp or not _raw.use_openmp(desc, num_threads):
            desc.num_threads = num_threads
        desc.workspace_limit = workspace_limit
        self._pointer = _raw.moec_context_create(desc)

    @property
    def name(self) -> str:
        """The device as messages call it: "cpu", "cuda:0"."""
        return "cpu" if self.device_type == DeviceType.CPU else f"cuda:{self.device_id}"

    @property
    def device(self) -> DeviceInfo:
        raw = _raw.moec_device_info()
        _raw.moec_context_device(self.raw, raw)
        return _device_info(raw)

    def stats(self) -> Stats:
        """Counters since the context was made or reset; reading never waits."""
        raw = _raw.moec_stats()
        _raw.moec_context_stats(self.raw, raw)
        return Stats(**{item.name: getattr(raw, item.name) for item in fields(Stats)})

    def reset_stats(self) -> None:
        _raw.moec_context_stats_reset(self.raw)

    def reserve(self, num_bytes: int, *, stream: Any = None) -> Self:
        """Hold at least `num_bytes` of scratch, so that later calls do not allocate."""
        _raw.moec_context_reserve(self.raw, num_bytes, stream_handle(stream))
        return self

    def trim(self) -> None:
        """Give unused scratch back."""
        _raw.moec_context_trim(self.raw)

    def empty(self, shape: Sequence[int], dtype: Any = "f32") -> DeviceArray:
        """Uninitialised memory of this device. Raises OutOfMemoryError."""
        return DeviceArray(self, shape, dtype)

    def zeros(
        self, shape: Sequence[int], dtype: Any = "f32", *, stream: Any = None
    ) -> DeviceArray:
        """Memory of this device, filled with zeros."""
        return self.empty(shape, dtype).zero(stream=stream)

    def array(self, values: Array, *, stream: Any = None) -> DeviceArray:
        """A copy of `values` on this device; a NumPy array may have any strides."""
        require(values=values)
        if isinstance(values, np.ndarray):
            values = np.ascontiguousarray(values)
        return self.empty(values.shape, values).copy_from(values, stream=stream)

    def asarray(self, values: Array, *, stream: Any = None) -> Array:
        """`values` where calls of this context can read them: a NumPy array itself on the CPU, a
        copy of it on a GPU; anything else as it is."""
        if isinstance(values, np.ndarray) and self.device_type != DeviceType.CPU:
            return self.array(values, stream=stream)
        return values

    def poll(self) -> int:
        """Status of queued work that failed after its call returned; 0 = none. Never waits."""
        result = _raw.moec_context_poll(self.raw)
        return int(result[-1] if isinstance(result, (list, tuple)) else result)

    def sync(self, stream: Any = None) -> None:
        """Wait for the stream; raises a deferred error if there is one."""
        _raw.moec_context_sync(self.raw, stream_handle(stream))


def context_of(context: Any) -> Any:
    """The low-level handle of the argument `context`."""
    return handle_of("context", context, Context)
