# SPDX-License-Identifier: Apache-2.0
"""N ranks of one host, a process each, and the time of what all of them do together.

A window is many calls in a row between two events, after half as many that are not counted; the
ranks line up in front of it, and the slowest rank's time counts. Calls of a graph are copies
captured side by side, so that its launch is not counted with each of them.
"""

import math
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

POLL_SECONDS, SPLITS = 0.2, 9


def start(size, arguments):
    """Run this program as `size` ranks; the worst exit status. One that fails ends the others."""
    environment = os.environ | {
        "MOEC_BENCH_MEET": os.path.join(tempfile.mkdtemp(), "meet"), "WORLD_SIZE": str(size)}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ranks = [subprocess.Popen([sys.executable, *arguments], env=environment | {"RANK": str(rank)})
             for rank in range(size)]
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        time.sleep(POLL_SECONDS)
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    return max(abs(rank.wait()) for rank in ranks)


class Mark:
    """An event of a CPU."""

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, later):
        return 1e3 * (later.at - self.at)


class Ranks:
    """This process among all. host: a group whose collectives do not touch a GPU."""

    def __init__(self, device):
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.on_gpu = device == "cuda"
        self.device = torch.device("cuda", self.rank) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        dist.init_process_group(
            "nccl" if self.on_gpu else "gloo", rank=self.rank, world_size=self.size,
            init_method="file://" + os.environ["MOEC_BENCH_MEET"],
            **({"device_id": self.device} if self.on_gpu else {}))
        self.host = dist.new_group(backend="gloo")
        self._token = torch.zeros(1, device=self.device)

    def say(self, text):
        """A line of the log, once."""
        if self.rank == 0:
            print(text, flush=True)

    def most(self, value):
        """The largest of all ranks' numbers."""
        found = torch.tensor([float(value)], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.host)
        return float(found)

    def total(self, counts):
        """The sum of all ranks' integers [n]."""
        found = torch.tensor(counts, dtype=torch.int64)
        dist.all_reduce(found, group=self.host)
        return found

    def stream(self):
        return torch.cuda.current_stream(self.device) if self.on_gpu else None

    def wait(self):
        if self.on_gpu:
            torch.cuda.synchronize()
        dist.barrier(group=self.host)

    def window(self, run, calls, settling=0):
        """Microseconds of a call, the slowest rank's. run: None where this rank has none."""
        self.wait()
        for _ in range(settling if run else 0):
            run()
        dist.all_reduce(self._token)
        if not self.on_gpu:
            begin = time.perf_counter()
            for _ in range(calls if run else 0):
                run()
            return self.most(1e6 * (time.perf_counter() - begin) / calls)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls if run else 0):
            run()
        end.record()
        torch.cuda.synchronize()
        return self.most(1e3 * begin.elapsed_time(end) / calls)

    def share(self, first, second, copies):
        """The part that first() has of the time of first(), second(), first(), ..: events between
        them lengthen both. Of graphs where there is a GPU."""
        marks = [self._mark() for _ in range(2 * copies + 1)]

        def run():
            marks[0].record()
            for i in range(copies):
                first()
                marks[2 * i + 1].record()
                second()
                marks[2 * i + 2].record()

        if self.on_gpu:
            from clock import graph_of
            run = graph_of(run)
        parts = []
        for _ in range(SPLITS):
            self.wait()
            dist.all_reduce(self._token)
            run()
            self.wait()
            firsts = sum(marks[i].elapsed_time(marks[i + 1]) for i in range(0, 2 * copies, 2))
            parts.append(firsts / marks[0].elapsed_time(marks[-1]))
        mean = torch.tensor([statistics.median(parts) / self.size], dtype=torch.float64)
        dist.all_reduce(mean, group=self.host)
        return float(mean)

    def _mark(self):
        return torch.cuda.Event(enable_timing=True, external=True) if self.on_gpu else Mark()

    def take_turns(self, runs, seconds, rounds):
        """{name: (median us, spread)} of runs {name: (function or None, calls that it makes)}. Each
        round begins with another one."""
        calls = {}
        for name, (run, _) in runs.items():
            self.window(run, 1)
            calls[name] = math.ceil(min(1e6 * seconds / max(self.window(run, 2), 1e-3), 1e4))
        times = {name: [] for name in runs}
        names = list(runs)
        for turn in range(rounds if runs else 0):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                run, made = runs[name]
                times[name].append(self.window(run, calls[name], calls[name] // 2) / made)
        return {name: (statistics.median(all_of),
                       round((max(all_of) - min(all_of)) / statistics.median(all_of), 3))
                for name, all_of in times.items()}


def finish(status):
    """Leave at once: graphs hold NCCL's communicator, and tearing it down may wait for them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
