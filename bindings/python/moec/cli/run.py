# SPDX-License-Identifier: Apache-2.0
"""moec run: one layer of a checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from .. import checkpoint, gguf_file, layer_names
from .._context import Context
from .._enums import Save
from .._tensors import Array, dtype_of, numpy_dtype
from ..golden import row_error
from ..model import LayerSpec, MoeLayer, read_layer
from ._common import (
    Device,
    Threads,
    console,
    describe_device,
    dtype,
    facts,
    out_file,
    read_array,
    to_bytes,
    wide_table,
)

EXAMPLE = "moec run qwen3 --tokens 512 --grad"
WANTED = ("logits", "expert_ids", "routing_weights")


def command(
    path: Annotated[Path, typer.Argument(
        help="Checkpoint folder, or a .safetensors or .gguf file.")],
    layer: Annotated[str | None, typer.Option(
        help="Number of a layer, or name (mtp.0: a draft); default: the model's first MoE."
    )] = None,
    config: Annotated[Path | None, typer.Option(help="config.json, when not beside it.")] = None,
    inputs: Annotated[
        Path | None, typer.Option("--input", exists=True, dir_okay=False,
                                  help="x [T,H]: .npy, or tensor x of a .safetensors.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Random tokens when no input is given.")] = 256,
    grad: Annotated[bool, typer.Option("--grad", help="Backward too, for a random d_y.")] = False,
    kind: Annotated[str | None, typer.Option(
        "--dtype", parser=dtype, metavar="TYPE",
        help="Of x and of quantised values; default: the config's, or the router's."
    )] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", callback=out_file, help="File for the outputs.")
    ] = Path("moec-run.safetensors"),
    seed: Annotated[int, typer.Option(min=0, help="Of the random numbers.")] = 0,
    threads: Threads = 0,
    device: Device = "cpu",
) -> None:
    """Run one MoE layer of a checkpoint and describe what came out.

    Model type and sizes come from config.json (for a golden file from its metadata). Tensors may be
    sharded, one per expert or stacked, plain or quantised as published; what cannot be told apart
    is refused, naming what was found.
    """
    source = gguf_file.open_checkpoint(path, config)
    if out.exists() and any(out.samefile(file) for file in source.files):
        raise typer.BadParameter(f"--out {out} is part of the checkpoint")
    spec = read_layer(source, layer, save=Save.ALL if grad else Save.NONE, dtype=kind)
    data, hidden = spec.experts.dtype, spec.experts.hidden
    rng = np.random.default_rng(seed)

    def array(name: str, rows: int) -> np.ndarray:
        if source.is_golden and name in source:  # it brings its own
            own: np.ndarray = source[name]
            return own
        return rng.standard_normal((rows, hidden), np.float32).astype(numpy_dtype(data))

    x = array("x", tokens) if inputs is None else read_array(inputs, "x", hidden, data)
    with Context(device, num_threads=threads) as context:
        where = describe_device(context, threads)
        live = MoeLayer(context, spec, frozen=False)
        placed = context.asarray(x)
        started = time.perf_counter()
        result = live.forward(placed, want=WANTED)
        context.sync()
        forward_s = time.perf_counter() - started
        on_device: dict[str, Array] = {}
        if grad:
            d_y = context.asarray(array("dout", len(x)))
            started = time.perf_counter()
            on_device = live.backward(result, d_y)
            context.sync()
        backward_s = time.perf_counter() - started if grad else 0.0
        outputs = {name: np.asarray(getattr(result, name)) for name in ("y", *WANTED)}
        grads = {name: np.asarray(value) for name, value in on_device.items()}
    console.print(_describe(source, spec, len(x), where, forward_s, backward_s))
    console.print(_routing(spec, outputs["expert_ids"], outputs["routing_weights"]))
    gradients = {f"d {_short(k, spec)}": v for k, v in _merge(grads).items()}
    console.print(_values({"x": x, "y": outputs["y"]} | gradients))
    if source.is_golden and "y" in source and inputs is None:
        error = row_error(outputs["y"], source["y"])
        console.print(f"worst row against the y in {path.name}: {error:.1e}", highlight=False)
    written = checkpoint.write(
        out, {"x": x} | outputs | {f"grad.{name}": value for name, value in grads.items()},
        checkpoint.OUTPUT | {"model_type": spec.family.model_types[0], "layer": spec.name},
    )
    console.print(f"wrote {out} ({to_bytes(written)})", highlight=False)


def _describe(source: checkpoint.Checkpoint, spec: LayerSpec, t: int, where: str,
              forward_s: float, backward_s: float) -> Any:
    e, r = spec.experts, spec.router
    total = spec.matrices.nbytes + (spec.shared.nbytes if spec.shared else 0)
    kinds, values = spec.matrices.kinds, dtype_of(e.dtype).name.lower()
    stored = f"{kinds}, values in {values}" if kinds else values
    seconds = f"first call: forward {forward_s * 1e3:.1f} ms"
    if backward_s:
        seconds += f", backward {backward_s * 1e3:.1f} ms"
    score = f"{r.score.name.lower()}, {r.selection.name.lower()}, norm {r.norm.name.lower()}"
    return facts(str(source.path), {
        "model": f"{source.config['model_type']}, {spec.name}",
        "layers": layer_names.describe(spec.layers),
        "experts": f"{e.num_experts} of which {e.top_k} per token"
                   + (f", {e.num_zero_experts} identity" if e.num_zero_experts else ""),
        "sizes": f"H {e.hidden}, I {e.inter}" + (f", shared {e.shared_inter}" * bool(e.shared)),
        "router": score + (f", scale {r.scale:g}" if r.scale else ""),
        "activation": e.activation.kind.name.lower(),
        "weights": f"{to_bytes(total)} {stored}",
        "tokens": t,
        "device": where,
        "time": seconds,
    })


def _routing(spec: LayerSpec, ids: np.ndarray, weights: np.ndarray) -> Any:
    count = np.bincount(ids[ids >= 0], minlength=spec.router.num_experts)
    share = count / max(count.sum(), 1)
    used = share[share > 0]
    total = weights.sum(-1)
    order = np.argsort(-count, kind="stable")
    return facts("routing", {
        "active experts": f"{(count > 0).sum()} of {len(count)}",
        "rows per expert": f"min {count.min()}, median {np.median(count):g}, max {count.max()}",
        "busiest": ", ".join(f"{e} ({count[e]})" for e in order[:5]),
        "balance": f"{np.exp(-(used * np.log(used)).sum()) / len(count):.2f} "
                   "(1 = even; exp(entropy) / experts)",
        "sum of weights": f"{total.mean() if total.size else 0:.4f} +- "
                          f"{total.std() if total.size else 0:.4f}",
    })


def _values(arrays: dict[str, Any]) -> Any:
    made = wide_table("values (bad: NaN or infinite)", "tensor", "shape", "mean", "std", "min",
                      "max", "bad")
    for name, value in arrays.items():
        parts = value if isinstance(value, list) else [value]
        size = sum(np.asarray(p).size for p in parts)
        dims = ([len(parts)] if isinstance(value, list) else []) + list(parts[0].shape)
        shape = " x ".join(map(str, dims))
        if not size:
            made.add_row(name, shape)
            continue
        moments = np.array([_moments(np.asarray(part)) for part in parts])
        mean, square, bad = moments[:, :3].sum(0) / (size, size, 1)
        made.add_row(name, shape, f"{mean:.2g}", f"{max(square - mean**2, 0) ** 0.5:.2g}",
                     f"{moments[:, 3].min():.2g}", f"{moments[:, 4].max():.2g}", f"{bad:.0f}")
    return made


def _moments(array: np.ndarray) -> tuple[float, ...]:
    """Sum, sum of squares, elements that are not finite, minimum, maximum."""
    flat = array.astype(np.float32).reshape(-1)
    low, high = flat.min(initial=np.inf), flat.max(initial=-np.inf)
    bad = 0 if np.isfinite(low) and np.isfinite(high) else (~np.isfinite(flat)).sum()
    return float(flat.sum(dtype=np.float64)), float(np.dot(flat, flat)), bad, low, high


def _merge(grads: dict[str, np.ndarray]) -> dict[str, Any]:
    """Gradients of the same tensor of every expert as one list."""
    merged: dict[str, Any] = {}
    for name, value in grads.items():
        parts = name.split(".")
        if "experts" in parts and parts[(at := parts.index("experts")) + 1].isdigit():
            key = ".".join([*parts[: at + 1], "*", *parts[at + 2 :]])
            merged.setdefault(key, []).append(value)
        else:
            merged[name] = value
    return merged


def _short(name: str, spec: LayerSpec) -> str:
    """A tensor's name within its layer."""
    return name.removeprefix(f"{spec.name}.").removesuffix(".weight")
