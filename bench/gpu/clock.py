# SPDX-License-Identifier: Apache-2.0
"""Time on the GPU: a second of load, then windows in which implementations take turns, each round
beginning with another one. A window begins with calls that are not counted: at the power limit the
clock follows what an implementation draws only after a while.

Each call is between two events of its own and starts with a cleared L2; clearing is not counted.
L2 is cleared by reading, since what is written would have to leave L2 during the call. It is
cleared once, or as often as it takes for the host to queue every call before the GPU comes to it:
as often for each of the implementations that take turns. A call that the GPU had begun before the
host had queued it whole is not counted, as it may hold time of the host, unless most are like that
("late": their part, where there are any).
"""

import ctypes
import statistics
import time

import torch

LOAD_SECONDS = 1.0
IDLE_SECONDS = 1.0  # a pause after which the chip has cooled: load again
FLUSH_BYTES = 256 << 20  # several times the L2
SETTLING = 0.5  # calls before those of a window, as a part of them
LEAD = 1.3  # of the time that the host needs to queue a call
MOST_CLEARS = 64  # what cannot be queued ahead waits for its own results


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
        self._flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._sink = torch.empty((), dtype=torch.int32, device="cuda")
        self._sensors = Sensors()
        self._busy_until = 0.0
        self._clear(8)
        self._clear_ms = self._window(lambda: self._clear(8), 3)[0] / 8

    def _clear(self, times):
        for _ in range(times):
            torch.amax(self._flush, dim=0, out=self._sink)

    def _window(self, run, calls, clears=1, lead=1, settling=0):
        """(mean ms of a call, SM MHz, W, part of the calls that were queued too late)"""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        self._clear(lead)
        for _ in range(settling):
            self._clear(clears)
            run()
        late = []
        for begin, end in events:
            self._clear(clears)
            begin.record()
            run()
            end.record()
            late.append(begin.query())
        sensed = self._sensors.read()  # the last calls are still under way
        torch.cuda.synchronize()
        self._busy_until = time.monotonic()
        times = [begin.elapsed_time(end) for begin, end in events]
        whole = [ms for ms, behind in zip(times, late) if not behind]
        counted = whole if 2 * len(whole) >= calls else times
        return statistics.fmean(counted), *sensed, sum(late) / calls

    def _clears(self, run):
        """(clears of a call, clears before the first) that keep the host ahead of the GPU"""
        def queue_ms():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - begin)

        host = LEAD * statistics.median(queue_ms() for _ in range(5))
        lead = min(MOST_CLEARS, 1 + int(host / self._clear_ms))
        spare = host - self._window(run, 3, lead, lead)[0]
        return max(1, min(MOST_CLEARS, 1 + int(spare / self._clear_ms))), lead

    def alternate(self, runs, window_seconds, rounds):
        """{name: dict(ms, spread, clears, windows, sm_mhz, watts, late)}: medians of the rounds."""
        cold = time.monotonic() - self._busy_until > IDLE_SECONDS
        clears, lead = map(max, zip(*(self._clears(run) for run in runs.values())))
        calls = {}
        for name, run in runs.items():
            begin = time.monotonic()
            self._window(run, 3, clears, lead)
            calls[name] = max(3, int(3 * window_seconds / (time.monotonic() - begin)) + 1)
        began = time.monotonic()
        while cold and time.monotonic() - began < LOAD_SECONDS:
            for run in runs.values():
                self._window(run, 3, clears, lead)
        windows = {name: [] for name in runs}
        names = list(runs)
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                settling = int(SETTLING * calls[name])
                window = self._window(runs[name], calls[name], clears, lead, settling)
                windows[name].append(window)
        taken = dict(clears=clears, windows=f"{rounds} of {window_seconds} s")
        return {name: summary(all_of) | taken for name, all_of in windows.items()}


def summary(windows):
    times, clocks, watts, late = zip(*windows)
    ms, behind = statistics.median(times), round(statistics.fmean(late), 3)
    return dict(
        ms=round(ms, 5), spread=round((max(times) - min(times)) / ms, 3),
        sm_mhz=int(statistics.median(clocks)), watts=round(statistics.median(watts)),
    ) | ({"late": behind} if behind else {})


def graph_of(run, pool=None):
    """run() captured once, as a function that replays it. pool: memory of graphs that take turns,
    none of which needs what another one left."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        run()
    return graph.replay
