# SPDX-License-Identifier: Apache-2.0
"""moec bench: time one layer shape."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .._context import Context, version
from .._enums import DeviceType
from ..measure import MOEC, NAIVE, Bench, Timing
from ..shapes import Shape
from ._common import (
    Device,
    DTypeOption,
    Model,
    Scheme,
    Threads,
    console,
    describe_device,
    errors,
    out_file,
    to_bytes,
    wide_table,
)

EXAMPLE = "moec bench --model qwen3-30b --tokens 1 --tokens 128 --naive --plot speed.png"


def command(
    model: Model,
    tokens: Annotated[
        list[int] | None, typer.Option("--tokens", "-t", min=1, help="May be repeated.")
    ] = None,
    dtype: DTypeOption = "bf16",
    scheme: Scheme = None,
    backward: Annotated[
        bool, typer.Option("--backward", help="Time a training step: forward and backward.")
    ] = False,
    naive: Annotated[
        bool, typer.Option("--naive", help="Time the per-expert NumPy loop (fp32) beside it.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0, help="Spent on each measurement.")] = 1.0,
    plot: Annotated[
        Path | None, typer.Option("--plot", callback=out_file, help="Draw the speeds: FILE.png.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=out_file, help="Write the figures.")
    ] = None,
    threads: Threads = 0,
    device: Device = "cpu",
) -> None:
    """Time one random layer of a real model's shape: median of repeated calls, by CUDA events on a
    GPU.

    FLOPs count real rows. Inference uses frozen weights, packed where there is a packed form;
    --backward changeable ones. With --scheme experts are frozen codes, and GB/s counts the bytes of
    codes and scales of the experts in use.
    """
    if naive and backward:
        raise typer.BadParameter("--naive times a forward pass; leave --backward out")
    plot = None if plot is None else _plot_file(plot)
    sizes = sorted(set(tokens or [1, 16, 128, 512]))
    engines = [MOEC, NAIVE] if naive else [MOEC]
    with Context(device, num_threads=threads) as context:
        with console.status(f"making one layer of {model.published}"):
            try:
                bench = Bench(context, model, dtype=dtype, backward=backward, scheme=scheme)
            except ValueError as error:  # a family that is not published so
                raise typer.BadParameter(str(error)) from None
        timings = _measure(bench, engines, sizes, seconds)
        weights = {"weight_bytes": bench.weight_bytes, "packed_bytes": bench.packed_bytes,
                   "weight_bits": bench.weight_bits}
        where, info, name = describe_device(context, threads), context.device, context.name
    step = "forward + backward" if backward else "forward"
    kind = f"{scheme} as {dtype}" if scheme else dtype
    title = f"{model.published}, {kind}, {step}, {where}"
    _print(title, timings)
    copy = f", packed copy {to_bytes(weights['packed_bytes'])}" * bool(weights["packed_bytes"])
    console.print(f"weights: {to_bytes(weights['weight_bytes'])} stored, "
                  f"{weights['weight_bits']:.2f} bits each{copy}", highlight=False)
    if json_file is not None:
        about = {"model": model.name, "dtype": dtype, "scheme": scheme, "backward": backward,
                 "device": name, **weights,
                 "chip": info.name, "arch": info.arch, "version": version()}
        if info.device_type == DeviceType.CPU:
            about["threads"] = threads or info.multiprocessors
        rows = [asdict(timing) for timing in timings]
        json_file.write_text(json.dumps(about | {"timings": rows}, indent=1) + "\n")
    if plot is not None:
        _plot(plot, title, model, timings)
        console.print(f"wrote {plot}", highlight=False)


def _measure(
    bench: Bench, engines: list[str], sizes: list[int], seconds: float
) -> list[Timing]:
    timings = []
    columns = (TextColumn("{task.description}"), BarColumn(),
               TextColumn("{task.fields[runs]} runs"), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task("", total=len(engines) * len(sizes), runs=0)
        for size in sizes:
            for engine in engines:
                progress.update(task, description=f"{engine}, {size} tokens")
                for found in bench.time(engine, size, seconds):
                    if isinstance(found, Timing):
                        timings.append(found)
                    else:
                        progress.update(task, runs=found)
                progress.advance(task)
    return timings


def _print(title: str, timings: list[Timing]) -> None:
    slow = {t.tokens: t.seconds for t in timings if t.engine == NAIVE}
    columns = ("engine", "tokens", "ms", "spread", "runs", "GFLOP/s", "weights GB/s")
    made = wide_table(title, *columns, *(["speed-up"] if slow else []))
    for t in timings:
        row = [t.engine, str(t.tokens), f"{t.seconds * 1e3:.2f}", f"{t.spread:.0%}", str(t.runs),
               f"{t.gflops:.1f}", f"{t.gbytes:.3g}" if t.gbytes else ""]
        if slow:
            row.append(f"{slow[t.tokens] / t.seconds:.1f} x")
        made.add_row(*row)
    console.print(made)
    for engine, clock in dict.fromkeys((t.engine, t.clock) for t in timings):
        console.print(f"ms of {engine}: {clock}", highlight=False)


def _plot_file(path: Path) -> Path:
    """The file that --plot means: a PNG without a suffix. Refused before anything is timed."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ModuleNotFoundError:
        raise typer.BadParameter("--plot needs matplotlib: pip install 'moec[plot]'") from None
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise typer.BadParameter(f"--plot {path}: {path.suffix!r}; {', '.join(kinds)} exist")
    return path if path.suffix else path.with_name(f"{path.name}.png")


def _plot(path: Path, title: str, model: Shape, timings: list[Timing]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for engine in dict.fromkeys(t.engine for t in timings):
        points = [t for t in timings if t.engine == engine]
        axes.plot([t.tokens for t in points], [t.gflops for t in points], marker="o", label=engine)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="GFLOP/s")
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xticks(sorted({t.tokens for t in timings}), minor=False)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, title=f"{model.experts} experts, top {model.top_k}")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
