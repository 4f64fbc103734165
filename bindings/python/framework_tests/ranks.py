# SPDX-License-Identifier: Apache-2.0
"""Ranks and programs in processes of their own: ranks.py MODULES... imports modules and forks them.
The imports take seconds of a core, more than what most of them do."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SECONDS = 240  # that a rank may take
MODULES = ["parallel_worker", "test_packed_parallel"]
if find_spec("transformers.distributed.expert_parallel"):  # transformers 5.23 and later
    MODULES.append("transformers_worker")


def run_ranks(main: Callable[..., None], size: int, folder: Path, *given: str) -> list[str]:
    """What `size` processes of main(rank, size, folder, *given) say, all of which end well."""
    forks = _forks()
    print(json.dumps([main.__module__, main.__name__, size, str(folder), *given]),
          file=forks.stdin, flush=True)
    statuses = json.loads(forks.stdout.readline())
    texts = [_output(folder, rank).read_text() for rank in range(size)]
    assert statuses == [0] * size, f"{statuses}\n" + "\n".join(texts)[-4000:]
    return texts


def run_program(folder: Path, file: Path, *given: object) -> str:
    """What `python FILE GIVEN...` says, which ends well."""
    (text,) = run_ranks(program, 1, folder, str(file), *map(str, given))
    return text


def program(rank: int, size: int, folder: Path, file: str, *given: str) -> None:
    """A program that finds its imports made."""
    sys.argv = [file, *given]
    sys.path[0] = str(Path(file).parent)
    runpy.run_path(file, run_name="__main__")


@functools.cache
def _forks() -> Any:
    """The process that forks. A process that has looked for GPUs cannot be forked to use one:
    where there are any, each rank imports what it needs."""
    import torch

    modules = [] if torch.cuda.is_available() else MODULES
    forks = subprocess.Popen([sys.executable, __file__, *modules], text=True,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(forks.communicate)
    return forks


def _output(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.txt"


def _serve() -> None:
    """Run jobs, a line each, and say how their ranks ended. A rank returns, and ends as a program
    does; once one has failed, the others are killed."""
    for line in sys.stdin:
        module, name, size, folder, *given = json.loads(line)
        ranks: list[int] = []
        for rank in range(size):
            if child := os.fork():
                ranks.append(child)
                continue
            signal.alarm(SECONDS)
            file = os.open(_output(Path(folder), rank), os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 1)
            os.dup2(file, 2)
            getattr(importlib.import_module(module), name)(rank, size, Path(folder), *given)
            return
        ended: dict[int, int] = {}
        while len(ended) < size:
            child, status = os.wait()
            ended[child] = os.waitstatus_to_exitcode(status)
            for other in set(ranks) - set(ended) if ended[child] else ():
                os.kill(other, signal.SIGKILL)
        print(json.dumps([ended[rank] for rank in ranks]), flush=True)


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        importlib.import_module(wanted)
    gc.freeze()  # else each rank looks through all of it when it ends, for 2 s
    _serve()
