# SPDX-License-Identifier: Apache-2.0
"""A random MoE layer under its family's published tensor names, at memory speed.

Weights are normal with standard deviation fan_in^-0.5. A 16-bit random number picks one of 65536
normal quantiles, so a gigabyte takes about a second. Codes and scales are picked likewise
(synth_codes.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from . import checkpoint, gguf_file, synth_codes
from ._enums import DType, Orientation, Shared
from ._tensors import dtype_of, numpy_dtype
from .families import BY_MODEL_TYPE
from .family import Family, Layout
from .shapes import Shape

_INDEX = "model.safetensors.index.json"
_CHUNK = 1 << 22  # elements that one task fills
_EXACT = ("select_bias", "per_expert_scale", "input_scale")  # tensors that models keep in fp32
_QUANTILES = np.array(
    [NormalDist().inv_cdf((i + 0.5) / 65536) for i in range(65536)], dtype=np.float32
)


def tiny_shape(scheme: str) -> Shape:
    """A shape that every scheme has, of a family that is published so."""
    model_type = "gpt_oss" if synth_codes.find(scheme).only_stacks else "qwen3_moe"
    return Shape(name="tiny", model_type=model_type, published="a tiny model", hidden=256,
                 inter=256, experts=4, zero_experts=0, top_k=2, shared_inter=0,
                 config={"norm_topk_prob": True})


class MemoryCheckpoint(dict[str, np.ndarray]):
    """Tensors and config as checkpoint.Checkpoint has them, without a file."""

    def __init__(self, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
        super().__init__(tensors)
        self.config = config
        self.path = Path("(memory)")
        self.kinds: dict[str, str] = {}
        """of GGUF's codes"""
        self.family: Family | None = None
        """None: that of the config's model_type"""


def config_of(shape: Shape) -> dict[str, Any]:
    """config.json of a shape, with the keys of its family."""
    family = BY_MODEL_TYPE[shape.model_type]
    config: dict[str, Any] = {"model_type": shape.model_type, "hidden_size": shape.hidden}
    config |= {key: getattr(shape, column) for column, key in family.sizes.items()}
    return config | dict(shape.config)


def make(
    shape: Shape, *, dtype: Any = "bf16", layer: int = 0, seed: int = 0, scheme: str | None = None
) -> MemoryCheckpoint:
    """The layer in memory: tensors under their published names, and config.json's content. scheme:
    experts are codes, as a name of synth_codes.SCHEMES says; the rest is of `dtype`. Raises
    ValueError for a scheme that this family or its sizes do not have."""
    code = dtype_of(dtype)
    kind = None if scheme is None else synth_codes.find(scheme)
    config = config_of(shape)
    family = BY_MODEL_TYPE[shape.model_type]
    if kind is not None:
        config["torch_dtype"] = numpy_dtype(code).name
        if kind.section is None:
            gguf_file.architecture_of(config)  # refuses what these files do not have
            family = gguf_file.family_of(config)
        else:
            config["quantization_config"] = kind.section
    made = MemoryCheckpoint({}, config)
    jobs: list[tuple[np.ndarray, tuple[str, Any], int]] = []
    for name, fill in _list_fills(shape, family, layer, code, kind):
        if kind is not None and kind.section is None and fill.table[0] == "gguf":
            made.kinds[name] = kind.kind
        array = made[name] = np.empty(fill.shape, fill.dtype) if fill.given is None else fill.given
        if fill.given is not None:
            continue
        flat = array.reshape(-1)
        if fill.dtype == np.int32:  # words of packed codes
            flat = flat.view(np.uint8)
        for start in range(0, flat.size, _CHUNK):
            jobs.append((flat[start : start + _CHUNK], fill.table, len(jobs)))
    tables = {(part.dtype, table): _table(part.dtype, *table) for part, table, _ in jobs}

    def work(job: tuple[np.ndarray, tuple[str, Any], int]) -> None:
        part, table, index = job
        bits = np.random.Generator(np.random.SFC64([seed, index]))
        words = bits.integers(0, 1 << 64, -(-part.size // 4), np.uint64)
        np.take(tables[part.dtype, table], words.view(np.uint16)[: part.size], out=part)

    with ThreadPoolExecutor() as pool:
        list(pool.map(work, jobs))
    for name, one in made.kinds.items():
        fan_in = shape.hidden if "_down_" not in name else (
            shape.shared_inter if "_shexp" in name else shape.inter)
        synth_codes.set_gguf_scales(one, made[name], fan_in**-0.5)
    if made.kinds:
        made.family = family
    return made


def _table(dtype: Any, what: str, value: Any) -> np.ndarray:
    """65536 values of a Fill."""
    values: Any = np.arange(65536)
    if what == "normal":
        values = _QUANTILES * np.float32(value)
        values = np.rint(values).clip(-127, 127) if dtype == np.int8 else values
    elif what == "scale":
        values = (values / 65536 + 0.5) * value
    elif what == "levels":
        values = np.resize(np.array(value), 65536)
    made: np.ndarray = values.astype(dtype)
    return made


def _list_fills(
    shape: Shape, family: Family, layer: int, code: DType, kind: synth_codes.Scheme | None
) -> Iterator[tuple[str, synth_codes.Fill]]:
    """(name, how to fill it) of every tensor of the layer."""
    for one in _list_tensors(shape, family, layer, kind):
        own = DType.F32 if one.role in _EXACT else code
        if kind is not None and one.is_matrix:
            (n, k), turned = one.dims[-2:], one.orientation == Orientation.IN_OUT
            matrix = synth_codes.Matrix(
                k if turned else n, n if turned else k, one.dims[0] if len(one.dims) == 3 else 0,
                one.orientation, numpy_dtype(code), len(one.name))
            yield from synth_codes.tensors(kind, one.name, matrix)
        else:
            yield one.name, synth_codes.Fill(
                numpy_dtype(own), one.dims, ("normal", one.fan_in**-0.5))


class _Tensor(NamedTuple):
    """A tensor of the layer as a plain model has it."""

    role: str
    name: str
    dims: tuple[int, ...]
    fan_in: int
    is_matrix: bool = False
    """of experts, or of the shared expert"""
    orientation: Orientation = Orientation.OUT_IN


def _list_tensors(
    shape: Shape, family: Family, layer: int, kind: synth_codes.Scheme | None
) -> Iterator[_Tensor]:
    """Every tensor of the layer."""
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
        fan_in = 100 if role in _EXACT else hidden
        yield _Tensor(role, path(names[0]), dims[role], fan_in)
    layout = synth_codes.layout_of(kind, family)
    yield from _list_matrices(layout, shape.experts, hidden, shape.inter, path)
    if family.shared != Shared.NONE and shape.shared_inter:
        layout = family.shared_layouts[0]
        yield from _list_matrices(layout, 0, hidden, shape.shared_inter, path)


def _list_matrices(
    layout: Layout, experts: int, hidden: int, inter: int, path: Any
) -> Iterator[_Tensor]:
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
        more = k, not role.endswith("_bias"), orientation
        if "{e}" in pattern:
            for e in range(experts):
                yield _Tensor(role, path(pattern.format(e=e)), matrix, *more)
        elif layout.flat:
            yield _Tensor(role, path(pattern), (experts * matrix[0], *matrix[1:]), *more)
        else:
            yield _Tensor(role, path(pattern), ((experts,) if experts else ()) + matrix, *more)


def write(made: MemoryCheckpoint, folder: Path, *, shards: int = 1) -> int:
    """Write config.json and the tensors, in one file or sharded with an index; returns bytes. The
    files of a model that was there are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in ("model.safetensors", "model-*-of-*.safetensors", _INDEX, "model.gguf"):
        for old in folder.glob(pattern):
            old.unlink()
    if made.kinds:
        return gguf_file.write_layer(folder / "model.gguf", made, made.config, made.kinds)
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
