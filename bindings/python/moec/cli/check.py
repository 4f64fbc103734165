# SPDX-License-Identifier: Apache-2.0
"""moec check: the golden vectors of every model family and of quantised experts."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track
from rich.table import Table

from .. import golden
from .._context import Context
from .._errors import MoecError
from ..checkpoint import CheckpointError
from ._common import Device, Threads, console, describe_device, errors, out_file, wide_table

EXAMPLE = "moec check --verbose"

# Column -> what a parameter's name contains; the first that fits takes it.
_COLUMNS = {
    "shared": ("shared",),
    "bias": ("bias",),
    "down": ("down", "output_linear", "w2"),
    "gate up": ("gate_up", "up_proj", "input_linear", "gate_proj"),
    "router": ("gate", "router", ""),
}
_CODED = ("y", "x", "weights", "16 bits", "values")


def command(
    folder: Annotated[
        Path | None, typer.Option("--golden", help="Folder of golden files; default: the packaged.")
    ] = None,
    family: Annotated[
        list[str] | None, typer.Option(
            "--family", help="Only this family or format; may be repeated.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="One line per gradient.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", callback=out_file, help="Write every error to this file."),
    ] = None,
    threads: Threads = 0,
    device: Device = "cpu",
) -> None:
    """Run y and every gradient of each golden family, and quantised experts of each format; exit
    code 1 when one is off.

    An error is that of the worst row, relative to the row's norm; the limit is 2e-5. Quantised
    experts run again in the type of their library, in 16 bits (limit 1e-2, f16 2e-3); "values" is
    the part of the sampled values that are not its own, which has to be 0.
    """
    files = golden.find_files(golden.default_folder() if folder is None else folder)
    if family:
        known = [path.stem for path in files]
        for name in set(family) - set(known):
            close = get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(known)}"
            raise typer.BadParameter(f"no golden file for {name!r}; {hint}")
        files = [path for path in files if path.stem in family]
    reports, failed = [], []
    made = wide_table("worst row error", "family", "y", "x", *_COLUMNS, "ms", "")
    coded = wide_table("worst row error, quantised experts", "format", *_CODED, "ms", "")
    with Context(device, num_threads=threads) as context:
        where = describe_device(context, threads)
        for path in track(files, "checking", console=errors, transient=True):
            try:
                report = golden.check_file(context, path)
            except (MoecError, CheckpointError) as error:
                failed.append(f"{path.stem}: {error}")
                made.add_row(path.stem, *["-"] * (3 + len(_COLUMNS)), "[red]error")
                continue
            reports.append(report)
            if report.kind:
                _add(coded, report, verbose, _CODED)
            else:
                _add(made, report, verbose, ("y", "x", *_COLUMNS))
            if not report.passed:
                failed.append(f"{report.family}: {', '.join(report.faults)}")
    for one in (made, coded):
        if one.row_count:
            console.print(one)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(report) for report in reports], indent=1))
    for line in failed:
        errors.print(f"[red]{line}", highlight=False)
    console.print(where, highlight=False)
    console.print(f"{len(files) - len(failed)} passed, {len(failed)} failed", highlight=False)
    if failed:
        raise typer.Exit(1)


def _add(
    made: Table, report: golden.Report, verbose: bool, columns: Collection[str]
) -> None:
    groups: dict[str, list[str]] = {}
    for name in report.errors:
        groups.setdefault(_coded_column(name) if report.kind else _column(name), []).append(name)
    cells = [_cell(report, groups.get(column, [])) for column in columns]
    verdict = "[green]ok" if report.passed else "[red]off"
    made.add_row(report.family, *cells, f"{report.seconds * 1e3:.0f}", verdict)
    if verbose:
        for name in report.errors:
            made.add_row(f"  {name}", _cell(report, [name]))


def _column(name: str) -> str:
    if name in ("y", "x"):
        return name
    return next(c for c, parts in _COLUMNS.items() if any(part in name for part in parts))


def _coded_column(name: str) -> str:
    if name.startswith("values."):
        return "values"
    return "16 bits" if name.endswith(("bf16", "f16")) else name.replace("routing_", "")


def _cell(report: golden.Report, names: list[str]) -> str:
    """The error of these tensors that is nearest to its limit, or furthest above it."""
    if not names:
        return ""
    def share(name: str) -> float:
        error, limit = report.errors[name], report.limit(name)
        return math.inf if math.isnan(error) or (error and not limit) else error / (limit or 1)

    worst = max(names, key=share)
    text = f"{report.errors[worst]:.1e}".replace("e-0", "e-")
    return text if report.errors[worst] <= report.limit(worst) else f"[red]{text}"
