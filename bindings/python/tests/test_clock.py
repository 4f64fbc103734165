# SPDX-License-Identifier: Apache-2.0
"""The clocks of `moec bench`; CUDA's beside a driver that only notes what is asked of it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from moec import clock


class Driver:
    """libcuda: an event is stamped when it is recorded, from a clock that steps advance."""

    def __init__(self) -> None:
        self.current, self.now = 7, 0.0  # another context than the primary one, which is 9
        self.stamps: dict[int, float] = {}
        self.log: list[str] = []
        self.failing = ""

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.log.append(name)
            if name == self.failing:
                return 700
            getattr(self, f"on_{name}", lambda *_: None)(*arguments)
            return 0

        if name.startswith("on_"):
            raise AttributeError(name)
        return call

    def on_cuDevicePrimaryCtxRetain(self, out: Any, device: Any) -> None:
        out._obj.value = 9

    def on_cuCtxGetCurrent(self, out: Any) -> None:
        out._obj.value = self.current

    def on_cuCtxSetCurrent(self, context: Any) -> None:
        self.current = context.value

    def on_cuEventCreate(self, out: Any, flags: int) -> None:
        out._obj.value = 100 + len(self.stamps)
        self.stamps[out._obj.value] = -1.0

    def on_cuEventRecord(self, event: Any, stream: Any) -> None:
        assert self.current == 9 and stream is None
        self.stamps[event.value] = self.now

    def on_cuEventElapsedTime(self, out: Any, before: Any, after: Any) -> None:
        out._obj.value = self.stamps[after.value] - self.stamps[before.value]

    def on_cuEventDestroy_v2(self, event: Any) -> None:
        del self.stamps[event.value]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    return made


def device_clock() -> clock.DeviceClock:
    context: Any = SimpleNamespace(device_type=2, device_id=1)
    made = clock.clock_of(context)
    assert isinstance(made, clock.DeviceClock)
    return made


def test_each_call_is_between_two_events(driver: Driver) -> None:
    took = iter([250.0, 500.0, 125.0])

    def step() -> None:
        driver.now += next(took)  # milliseconds
        driver.current = 8  # as a call may leave it

    timer = device_clock()
    assert timer.time(step, 3) == [0.25, 0.5, 0.125]
    assert driver.log.count("cuEventRecord") == 4 and driver.log.count("cuEventSynchronize") == 1
    assert driver.log.index("cuEventSynchronize") < driver.log.index("cuEventElapsedTime")
    assert driver.current == 7 and not driver.stamps


def test_a_failure_of_the_driver_is_named(driver: Driver) -> None:
    timer = device_clock()
    driver.failing = "cuEventSynchronize"
    with pytest.raises(OSError, match="cuEventSynchronize of the CUDA driver .* status 700"):
        timer.time(lambda: None, 1)
    assert driver.current == 7 and not driver.stamps


def test_the_wall_clock() -> None:
    context: Any = SimpleNamespace(device_type=1)
    timer = clock.clock_of(context)
    calls: list[int] = []
    assert isinstance(timer, clock.WallClock)
    assert all(t >= 0 for t in timer.time(lambda: calls.append(1), 3)) and len(calls) == 3
