# SPDX-License-Identifier: Apache-2.0
"""A random MoE layer under its family's published tensor names, at memory speed.

Weights are normal with standard deviation fan_in^-0.5. A 16-bit random number picks one of 65536
normal quantiles, so a gigabyte takes about a second.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from . import checkpoint
from ._enums import DType, Shared
from ._tensors import dtype_of, numpy_dtype
from .families import BY_MODEL_TYPE
from .family import Layout
from .shapes import Shape

_INDEX = "model.safetensors.index.json"
_CHUNK = 1 << 22  # elements that one task fills
_EXACT = ("select_bias", "per_expert_scale", "input_scale")  # tensors that models keep in fp32
_QUANTILES = np.array(
    [NormalDist().inv_cdf((i + 0.5) / 65536) for i in range(65536)], dtype=np.float32
)


class MemoryCheckpoint(dict[str, np.ndarray]):
    """Tensors and config as checkpoint.Checkpoint has them, without a file."""

    def __init__(self, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        super().__init__(tensors)
        self.config = config
        self.path = Path("(memory)")


def config_of(shape: Shape) -> dict[str, Any]:
    """config.json of a shape, with the keys of its family."""
    family = BY_MODEL_TYPE[shape.model_type]
    config: dict[str, Any] = {"model_type": shape.model_type, "hidden_size": shape.hidden}
    config |= {key: getattr(shape, column) for column, key in family.sizes.items()}
    return config | dict(shape.config)


def make(
    shape: Shape, *, dtype: Any = "bf16", layer: int = 0, seed: int = 0
) -> MemoryCheckpoint:
    """The layer in memory: tensors under their published names, and config.json's content."""
    code = dtype_of(dtype)
    tensors: dict[str, np.ndarray] = {}
    jobs: list[tuple[np.ndarray, float, int]] = []
    for role, name, dims, fan_in in _list_tensors(shape, layer):
        kind = DType.F32 if role in _EXACT else code
        array = tensors[name] = np.empty(dims, numpy_dtype(kind))
        flat = array.reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            jobs.append((flat[start : start + _CHUNK], fan_in**-0.5, len(jobs)))
    tables: dict[tuple[Any, float], np.ndarray] = {}
    for part, scale, _ in jobs:
        key = (part.dtype, scale)
        if key not in tables:
            tables[key] = (_QUANTILES * np.float32(scale)).astype(part.dtype)

    def fill(job: tuple[np.ndarray, float, int]) -> None:
        part, scale, index = job
        bits = np.random.Generator(np.random.SFC64([seed, index]))
        words = bits.integers(0, 1 << 64, -(-part.size // 4), np.uint64)
        np.take(tables[part.dtype, scale], words.view(np.uint16)[: part.size], out=part)

    with ThreadPoolExecutor() as pool:
        list(pool.map(fill, jobs))
    return MemoryCheckpoint(tensors, config_of(shape))


def _list_tensors(shape: Shape, layer: int) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """(role, name, dimensions, fan-in) of every tensor of the layer."""
    family = BY_MODEL_TYPE[shape.model_type]
    stem = f"{family.prefix}.{layer}."
    base = stem + (f"{family.block}." if family.block else "")
    ids, hidden = shape.experts + shape.zero_experts, shape.hidden

    def path(name: str) -> str:
        return stem + name[3:] if name.startswith("../") else base + name

    mix = 2 if family.shared == Shared.SOFTMAX2 else 1
    dims: dict[str, tuple[int, ...]] = {
        "gate_weight": (ids, hidden), "gate_bias": (ids,), "select_bias": (ids,),
        "per_expert_scale": (ids,), "input_scale": (hidden,), "output_bias": (hidden,),
        "shared_gate": (mix, hidden), "shared_gate_bias": (mix,),
    }
    for role, names in family.tensors.items():
        yield role, path(names[0]), dims[role], 100 if role in _EXACT else hidden
    yield from _list_matrices(family.layouts[0], shape.experts, hidden, shape.inter, path)
    if family.shared != Shared.NONE and shape.shared_inter:
        layout = family.shared_layouts[0]
        yield from _list_matrices(layout, 0, hidden, shape.shared_inter, path)


def _list_matrices(
    layout: Layout, experts: int, hidden: int, inter: int, path: Any
) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """As _list_tensors, of one layout; experts 0 means the shared expert's 2D matrices."""
    for role, pattern in layout.names.items():
        n, k = {"gate_up": (2 * inter, hidden), "down": (hidden, inter)}.get(
            role.removesuffix("_bias"), (inter, hidden)
        )
        is_down = role.startswith("down")
        orientation = layout.down_orientation if is_down else layout.gate_up_orientation
        matrix: tuple[int, ...] = (n, k) if orientation == 0 else (k, n)
        if role.endswith("_bias"):
            matrix = (n,)
        if "{e}" in pattern:
            for e in range(experts):
                yield role, path(pattern.format(e=e)), matrix, k
        elif layout.flat:
            yield role, path(pattern), (experts * matrix[0], *matrix[1:]), k
        else:
            yield role, path(pattern), ((experts,) if experts else ()) + matrix, k


def write(made: MemoryCheckpoint, folder: Path, *, shards: int = 1) -> int:
    """Write config.json and the tensors, in one file or sharded with an index; returns bytes. The
    files of a model that was there are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in ("model.safetensors", "model-*-of-*.safetensors", _INDEX):
        for old in folder.glob(pattern):
            old.unlink()
    (folder / "config.json").write_text(json.dumps(made.config, indent=1) + "\n")
    names = list(made)
    per_shard = math.ceil(len(names) / shards)
    parts = [names[i : i + per_shard] for i in range(0, len(names), per_shard)]
    total, placed = 0, dict[str, str]()
    for number, part in enumerate(parts, 1):
        file = "model.safetensors"
        if shards > 1:
            file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        placed |= dict.fromkeys(part, file)
        total += checkpoint.write(folder / file, {n: made[n] for n in part}, {"format": "np"})
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (folder / _INDEX).write_text(json.dumps(index))
    return total
