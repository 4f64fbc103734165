# SPDX-License-Identifier: Apache-2.0
"""How long calls take: by the wall clock on the CPU, by events of the driver on a GPU."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from ._context import Context
from ._enums import DeviceType

Step = Callable[[], Any]


class WallClock:
    """Seconds between the begin and the end of each call."""

    name = "wall clock of each call"
    batch = 1
    """calls that time() is best given at once"""

    def time(self, step: Step, runs: int) -> list[float]:
        stamps = [time.perf_counter()]
        for _ in range(runs):
            step()
            stamps.append(time.perf_counter())
        return [after - before for before, after in pairwise(stamps)]


class DeviceClock:
    """Seconds that a context's GPU takes for each of several calls on the default stream, between
    CUDA events in front of each call and behind it. All are queued before any is waited for, so the
    GPU does not wait for the host, unless a call takes the host longer to queue than the GPU to do.
    """

    batch = 16
    name = f"CUDA events around each of {batch} calls, queued one behind the other"

    def __init__(self, context: Context) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")  # the plug-in has found it
        self._primary = ctypes.c_void_p()  # the context that the CUDA runtime works in
        device = ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), context.device_id)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._primary), device)

    def time(self, step: Step, runs: int) -> list[float]:
        before = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(before))
        self._call("cuCtxSetCurrent", self._primary)
        events: list[ctypes.c_void_p] = []
        try:
            for _ in range(runs + 1):
                events.append(ctypes.c_void_p())
                self._call("cuEventCreate", ctypes.byref(events[-1]), 0)
            self._record(events[0])
            for event in events[1:]:
                step()
                self._record(event)
            self._call("cuEventSynchronize", events[-1])
            return [self._seconds(*pair) for pair in pairwise(events)]
        finally:
            for event in events:
                self._driver.cuEventDestroy_v2(event)
            self._call("cuCtxSetCurrent", before)

    def _record(self, event: ctypes.c_void_p) -> None:
        self._call("cuCtxSetCurrent", self._primary)  # a step may leave another one
        self._call("cuEventRecord", event, None)

    def _seconds(self, before: ctypes.c_void_p, after: ctypes.c_void_p) -> float:
        milliseconds = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(milliseconds), before, after)
        return milliseconds.value / 1e3

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            raise OSError(f"moec.clock: {name} of the CUDA driver failed with status {status}")


def clock_of(context: Context) -> WallClock | DeviceClock:
    """The clock for calls of a context."""
    return WallClock() if context.device_type == DeviceType.CPU else DeviceClock(context)
