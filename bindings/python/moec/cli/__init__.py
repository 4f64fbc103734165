# SPDX-License-Identifier: Apache-2.0
"""The `moec` command."""

from __future__ import annotations

import sys

import typer

from .._errors import MoecError
from ..checkpoint import CheckpointError
from . import bench, check, epsim, info, path, run, synth
from ._common import errors

app = typer.Typer(
    name="moec",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    help="Mixture-of-Experts layers: look, run, check, measure.",
)
for module in (info, path, run, synth, check, bench, epsim):
    name = module.__name__.rpartition(".")[2]
    app.command(name, epilog=f"Example: {module.EXAMPLE}")(module.command)


def main() -> None:
    """Entry point: failures are one line on stderr and exit code 1."""
    try:
        app()
    except (MoecError, CheckpointError, OSError, MemoryError) as error:
        errors.print(f"[bold red]error[/]: {str(error) or type(error).__name__}", highlight=False)
        sys.exit(1)
