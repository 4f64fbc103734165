# SPDX-License-Identifier: Apache-2.0
"""What the commands share: consoles, tables, option types, arrays on disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from .. import shapes, synth, synth_codes
from .._context import Context
from .._enums import DeviceType
from .._tensors import dtype_of, numpy_dtype
from ..checkpoint import CheckpointError, SafetensorsFile

console = Console()
errors = Console(stderr=True)


def model(name: str) -> shapes.Shape:
    """Option value -> shape; a wrong name is a usage error that suggests the right one."""
    try:
        return shapes.find(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def scheme(name: str) -> str:
    """Option value -> the same, the name of a scheme."""
    try:
        synth_codes.find(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return name


def make(shape: shapes.Shape, **options: Any) -> synth.MemoryCheckpoint:
    """synth.make(); a family that is not published so is a usage error."""
    try:
        return synth.make(shape, **options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def dtype(name: str) -> str:
    """Option value -> one of the float types' names."""
    try:
        code = dtype_of(name)
    except TypeError:
        code = None
    if code is None or code.name not in ("F32", "F16", "BF16"):
        raise typer.BadParameter(f"{name!r}; bf16, f16 and f32 exist")
    return code.name.lower()


def device(name: str) -> str:
    """Option value -> the same, of the form that a context takes."""
    if not re.fullmatch(r"(cpu|cuda)(:[0-9]{1,4})?", name):
        raise typer.BadParameter(f'{name!r}; "cpu", "cuda" and "cuda:N" exist')
    return name


def out_file(path: Path | None) -> Path | None:
    """Option value -> the same, a file that can be made. Refused before anything is computed."""
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; the name of a file is needed")
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"{path}: there is no folder {path.parent}; make it first")
    return path


Model = Annotated[
    shapes.Shape,
    typer.Option("--model", "-m", parser=model, metavar="NAME",
                 help="A model of the shapes file, such as qwen3-30b."),
]
OptionalModel = Annotated[
    shapes.Shape | None,
    typer.Option("--model", "-m", parser=model, metavar="NAME",
                 help="A model of the shapes file, such as qwen3-30b."),
]
Scheme = Annotated[
    str | None,
    typer.Option("--scheme", parser=scheme, metavar="NAME",
                 help="Experts as codes: nf4, mxfp4, fp8-block, int4, awq, gptq, gguf-q4_k, ..."),
]
DTypeOption = Annotated[
    str, typer.Option("--dtype", parser=dtype, metavar="TYPE", help="bf16, f16 or f32.")
]
Threads = Annotated[
    int, typer.Option("--threads", min=0, help="CPU threads; 0: all that this process may use.")
]
Device = Annotated[
    str, typer.Option("--device", parser=device, metavar="NAME", help='"cpu", "cuda" or "cuda:N".')
]


def table(title: str, *columns: str) -> Table:
    """A table whose first column is text, which folds, and whose others are numbers."""
    made = Table(title=title, title_justify="left", title_style="bold")
    made.add_column(columns[0], overflow="fold")
    for column in columns[1:]:
        made.add_column(column, justify="right", no_wrap=True)
    return made


def wide_table(title: str, *columns: str) -> Table:
    """A table without lines, for rows that would not fit 80 columns otherwise."""
    made = table(title, *columns)
    made.box, made.pad_edge, made.padding = None, False, (0, 1, 0, 0)
    return made


def facts(title: str, rows: dict[str, Any]) -> Table:
    """A two-column table of names and values."""
    made = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    made.add_column(style="cyan", no_wrap=True)
    made.add_column(overflow="fold")  # a path is never cut
    for name, value in rows.items():
        made.add_row(name, str(value))
    return made


def describe_device(context: Context, threads: int) -> str:
    """Device and chip of a context, with the --threads that it was made with if it is the CPU."""
    info = context.device
    used = f", {threads or info.multiprocessors} threads" * (info.device_type == DeviceType.CPU)
    return f"{context.name} ({info.name}, {info.arch}{used})"


def read_array(path: Path, name: str, hidden: int, kind: Any) -> np.ndarray:
    """An array [T,H] from a .npy file, or tensor `name` of a .safetensors file, in type `kind`."""
    if path.suffix == ".npy":
        try:
            with path.open("rb") as npy:
                array = np.lib.format.read_array(npy, allow_pickle=False)
        except ValueError as error:
            raise CheckpointError(f"{path}: not an array of numbers: {error}") from None
    elif path.suffix == ".safetensors":
        file = SafetensorsFile(path)
        if name not in file:
            raise CheckpointError(f"{path}: no tensor {name!r}; found {', '.join(list(file)[:4])}")
        array = file[name]
    else:
        raise CheckpointError(f"{path}: .npy and .safetensors are read, not {path.suffix!r}")
    if array.ndim != 2 or array.shape[1] != hidden:
        raise CheckpointError(f"{path}: shape {list(array.shape)}; [T,{hidden}] is needed")
    try:
        return np.ascontiguousarray(array.astype(numpy_dtype(kind), copy=False))
    except (ValueError, TypeError):
        raise CheckpointError(f"{path}: {array.dtype} is not a type of numbers") from None


def to_bytes(count: float) -> str:
    """Bytes in words: 1.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
