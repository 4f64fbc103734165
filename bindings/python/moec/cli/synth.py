# SPDX-License-Identifier: Apache-2.0
"""moec synth: a full-size random layer under published names."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from .. import synth
from ._common import DTypeOption, OptionalModel, Scheme, console, make, to_bytes

EXAMPLE = "moec synth --scheme gptq --out tiny"


def command(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    model: OptionalModel = None,
    scheme: Scheme = None,
    dtype: DTypeOption = "bf16",
    layer: Annotated[int, typer.Option(min=0, help="Number of the layer.")] = 0,
    shards: Annotated[int, typer.Option(min=1, help="Files to spread the tensors over.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the random numbers.")] = 0,
) -> None:
    """Write a full-size random layer under the published tensor names, with its config.json.

    --scheme writes its experts as codes, in the names and types of the library that publishes such;
    without --model, of a tiny layer.
    """
    if model is None:
        if scheme is None:
            raise typer.BadParameter("--model is missing; without it --scheme writes a tiny layer")
        model = synth.tiny_shape(scheme)
    started = time.perf_counter()
    with console.status(f"making one layer of {model.published}"):
        made = make(model, dtype=dtype, layer=layer, seed=seed, scheme=scheme)
    with console.status(f"writing {out}"):
        written = synth.write(made, out, shards=shards)
    seconds = time.perf_counter() - started
    first = next(iter(made))
    console.print(
        f"{out}: one layer of {model.published}, {len(made)} tensors ({first}, ...), "
        f"{to_bytes(written)} in {seconds:.1f} s", highlight=False,
    )
