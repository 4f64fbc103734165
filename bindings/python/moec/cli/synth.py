# SPDX-License-Identifier: Apache-2.0
"""moec synth: a full-size random layer under published names."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from .. import synth
from ._common import DTypeOption, Model, console, to_bytes

EXAMPLE = "moec synth --model qwen3-30b --out qwen3"


def command(
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    dtype: DTypeOption = "bf16",
    layer: Annotated[int, typer.Option(min=0, help="Number of the layer.")] = 0,
    shards: Annotated[int, typer.Option(min=1, help="Files to spread the tensors over.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the random numbers.")] = 0,
) -> None:
    """Write a full-size random layer under the published tensor names, with its config.json."""
    started = time.perf_counter()
    with console.status(f"making one layer of {model.published}"):
        made = synth.make(model, dtype=dtype, layer=layer, seed=seed)
    with console.status(f"writing {out}"):
        written = synth.write(made, out, shards=shards)
    seconds = time.perf_counter() - started
    first = next(iter(made))
    console.print(
        f"{out}: one layer of {model.published}, {len(made)} tensors ({first}, ...), "
        f"{to_bytes(written)} in {seconds:.1f} s", highlight=False,
    )
