# SPDX-License-Identifier: Apache-2.0
"""Time on the GPU: a second of load, then windows in which implementations take turns.

Each call is between two events of its own and starts with a cleared L2; clearing is not counted.
"""

import ctypes
import statistics
import time

import torch

LOAD_SECONDS = 1.0
IDLE_SECONDS = 1.0  # a pause after which the chip has cooled: load again
FLUSH_BYTES = 256 << 20  # several times the L2


class Sensors:
    """SM clock and power, from the driver's management library."""

    def __init__(self):
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        index = torch.cuda.current_device()
        if self._nvml.nvmlInit_v2() or self._nvml.nvmlDeviceGetHandleByIndex_v2(
            index, ctypes.byref(self._device)
        ):
            raise OSError("nvml: the GPU cannot be opened")

    def read(self):
        """(SM clock in MHz, power in W)"""
        clock, power = ctypes.c_uint(), ctypes.c_uint()
        self._nvml.nvmlDeviceGetClockInfo(self._device, 1, ctypes.byref(clock))  # 1: SM
        self._nvml.nvmlDeviceGetPowerUsage(self._device, ctypes.byref(power))
        return clock.value, power.value / 1e3


class Clock:
    def __init__(self):
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self._sensors = Sensors()
        self._busy_until = 0.0

    def window(self, run, calls):
        """(mean ms of a call, SM MHz, W)"""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        for begin, end in events:
            self._flush.zero_()
            begin.record()
            run()
            end.record()
        sensed = self._sensors.read()  # the last calls are still under way
        torch.cuda.synchronize()
        self._busy_until = time.monotonic()
        return statistics.fmean(begin.elapsed_time(end) for begin, end in events), *sensed

    def alternate(self, runs, window_seconds, rounds):
        """{name: dict(ms, spread, sm_mhz, watts)}: medians of the rounds."""
        cold = time.monotonic() - self._busy_until > IDLE_SECONDS
        calls = {}
        for name, run in runs.items():
            self.window(run, 2)
            begin = time.monotonic()
            self.window(run, 3)
            calls[name] = max(3, int(3 * window_seconds / (time.monotonic() - begin)) + 1)
        began = time.monotonic()
        while cold and time.monotonic() - began < LOAD_SECONDS:
            for run in runs.values():
                self.window(run, 3)
        windows = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                windows[name].append(self.window(run, calls[name]))
        return {name: summary(all_of) for name, all_of in windows.items()}


def summary(windows):
    times, clocks, watts = zip(*windows)
    ms = statistics.median(times)
    return dict(
        ms=round(ms, 5), spread=round((max(times) - min(times)) / ms, 3),
        sm_mhz=int(statistics.median(clocks)), watts=round(statistics.median(watts)),
    )


def graph_of(run):
    """run() captured once, as a function that replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay
