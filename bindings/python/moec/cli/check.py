# SPDX-License-Identifier: Apache-2.0
"""moec check: the golden vectors of every model family."""

from __future__ import annotations

import json
import math
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


def command(
    folder: Annotated[
        Path | None, typer.Option("--golden", help="Folder of golden files; default: the packaged.")
    ] = None,
    family: Annotated[
        list[str] | None, typer.Option("--family", help="Only this family; may be repeated.")
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
    """Run y and every gradient of each golden family; exit code 1 when one is off.

    An error is that of the worst row, relative to the row's norm; the limit is 2e-5.
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
            _add(made, report, verbose)
            if not report.passed:
                failed.append(f"{report.family}: {report.worst:.1e} is above {golden.TOLERANCE:g}")
    console.print(made)
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(report) for report in reports], indent=1))
    for line in failed:
        errors.print(f"[red]{line}", highlight=False)
    console.print(where, highlight=False)
    console.print(f"{len(files) - len(failed)} passed, {len(failed)} failed", highlight=False)
    if failed:
        raise typer.Exit(1)


def _add(made: Table, report: golden.Report, verbose: bool) -> None:
    groups: dict[str, float] = {}
    for name, error in report.errors.items():
        fits = (c for c, parts in _COLUMNS.items() if any(part in name for part in parts))
        column = name if name in ("y", "x") else next(fits)
        previous = groups.get(column, 0.0)
        groups[column] = error if math.isnan(error) else max(previous, error)
    cells = [_cell(groups.get(column)) for column in ("y", "x", *_COLUMNS)]
    verdict = "[green]ok" if report.passed else "[red]off"
    made.add_row(report.family, *cells, f"{report.seconds * 1e3:.0f}", verdict)
    if verbose:
        for name, error in report.errors.items():
            made.add_row(f"  {name}", _cell(error))


def _cell(error: float | None) -> str:
    if error is None:
        return ""
    text = f"{error:.1e}".replace("e-0", "e-")
    return text if error <= golden.TOLERANCE else f"[red]{text}"
