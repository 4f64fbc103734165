#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train a mixture-of-experts language model of 10 million parameters on the CPU, on moec and on
PyTorch's grouped_mm: same text, same start, same batches; then compare.

    python examples/train_moe/train.py                  # both, 100 steps each
    python examples/train_moe/train.py --steps 1000 --experts moec

The text is the language reference that comes with every Python (pydoc_data.topics); its last tenth
is held out. Each implementation trains in a process of its own, so that peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from model import CONTEXT, MAKERS, LanguageModel
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

BATCH, HELD_OUT_BATCHES = 8, 12


def read_text() -> torch.Tensor:
    """The text as bytes."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8).long()


def batch(text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
    return torch.stack([text[s : s + CONTEXT + 1] for s in starts])


@torch.no_grad()
def held_out_losses(model: LanguageModel, text: torch.Tensor) -> list[float]:
    generator = torch.Generator().manual_seed(2)
    return [model.loss(batch(text, generator)).item() for _ in range(HELD_OUT_BATCHES)]


def train(implementation: str, steps: int, seed: int) -> dict[str, Any]:
    """One run; its losses, median step and peak memory."""
    text = read_text()
    cut = len(text) * 9 // 10
    model = LanguageModel(implementation, seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    before = held_out_losses(model, text[cut:])
    times = []
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:>10}"), BarColumn(), TextColumn(
        "step {task.completed}/{task.total}  loss {task.fields[loss]:.3f}"), TimeRemainingColumn())
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        task = progress.add_task(implementation, total=steps, loss=math.nan)
        for _ in range(steps):
            ids = batch(text[:cut], generator)
            begin = time.perf_counter()
            loss = model.loss(ids)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            times.append(time.perf_counter() - begin)
            progress.update(task, advance=1, loss=loss.item())
    after = held_out_losses(model, text[cut:])
    return {
        "implementation": implementation,
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": len(text), "before": statistics.mean(before), "after": statistics.mean(after),
        "noise": statistics.stdev(after) / len(after) ** 0.5,
        "step_ms": 1e3 * statistics.median(times),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def run_apart(implementation: str, steps: int, seed: int) -> dict[str, Any]:
    """train() in another process."""
    command = [sys.executable, __file__, "--experts", implementation, "--steps", str(steps),
               "--seed", str(seed), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def show(results: list[dict[str, Any]]) -> None:
    table = Table(title=f"{results[0]['parameters'] / 1e6:.1f} M parameters, "
                        f"{results[0]['bytes'] / 1e3:.0f} kB of text")
    for heading in ("experts", "held-out loss before", "after", "ms a step", "peak MiB"):
        table.add_column(heading, justify="left" if heading == "experts" else "right")
    for r in results:
        table.add_row(r["implementation"], f"{r['before']:.3f}", f"{r['after']:.3f}",
                      f"{r['step_ms']:.1f}", f"{r['peak_mib']:.0f}")
    Console(width=100).print(table)


def check(results: list[dict[str, Any]]) -> list[str]:
    """What is wrong with two runs; nothing when all is well."""
    wrong = []
    for r in results:
        if r["parameters"] < 10_000_000:
            wrong.append(f"{r['parameters']} parameters; 10 million are wanted")
        if not r["after"] < 0.7 * r["before"]:
            wrong.append(f"{r['implementation']}: held-out loss {r['before']:.3f}, then "
                         f"{r['after']:.3f}; it should have fallen")
    first, second = results
    difference, noise = abs(first["after"] - second["after"]), 2 * first["noise"]
    print(f"held-out losses differ by {difference:.4f}; twice their standard error is {noise:.4f}")
    if not difference <= noise:
        wrong.append("the two implementations do not learn the same")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", choices=[*MAKERS, "both"], default="both")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="exit 1 unless both learn, and alike")
    parser.add_argument("--json", action="store_true", help="print one run's figures as JSON")
    args = parser.parse_args()
    if args.json:
        print(json.dumps(train(args.experts, args.steps, args.seed)))
        return 0
    names = list(MAKERS) if args.experts == "both" else [args.experts]
    results = [run_apart(name, args.steps, args.seed) for name in names]
    show(results)
    if not args.check or len(results) < 2:
        return 0
    wrong = check(results)
    for text in wrong:
        print(f"train.py: {text}")
    print(f"{2 - bool(wrong)} passed, {int(bool(wrong))} failed")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
