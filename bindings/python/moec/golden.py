# SPDX-License-Identifier: Apache-2.0
"""The golden vectors: y and every gradient of one layer of each family, by its reference code, and
of quantised experts of each format, by the libraries that make them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from . import golden_codes
from ._context import Context
from ._enums import LossKind, Save
from ._losses import Loss
from .checkpoint import Checkpoint, CheckpointError, SafetensorsFile
from .model import MoeLayer, read_layer

TOLERANCE = 2e-5  # fp32; a float64 evaluation of all families stays under 7.6e-6


@dataclass(frozen=True, slots=True)
class Report:
    """Worst row error of every compared tensor ("y", "x", then parameters), by name. Of quantised
    experts "values.*" is the part of a matrix's values that are not the library's."""

    family: str
    errors: dict[str, float]
    seconds: float
    limits: dict[str, float] = field(default_factory=dict)
    """where they are not TOLERANCE"""
    kind: str = ""
    """of codes; "" for plain experts"""

    def limit(self, name: str) -> float:
        return self.limits.get(name, TOLERANCE)

    @property
    def faults(self) -> list[str]:
        """What is off. NaN is."""
        return [f"{name} {error:.1e} is above {self.limit(name):g}"
                for name, error in self.errors.items() if not error <= self.limit(name)]

    @property
    def passed(self) -> bool:
        return not self.faults


def row_error(got: np.ndarray, ref: np.ndarray) -> float:
    """Worst row of ||got - ref|| / max(||ref row||, 0.01 * the largest row norm).

    The floor keeps reference rows that are rounding noise around an exact 0 from counting as wrong.
    """
    if got.shape != ref.shape:
        raise ValueError(f"shapes {got.shape} and {ref.shape} cannot be compared")
    ref64 = ref.reshape(-1, ref.shape[-1]).astype(np.float64)
    diff = got.reshape(ref64.shape).astype(np.float64) - ref64
    norms = np.linalg.norm(ref64, axis=1)
    floor = max(0.01 * norms.max(initial=0.0), np.finfo(np.float64).tiny)
    return float((np.linalg.norm(diff, axis=1) / np.maximum(norms, floor)).max(initial=0.0))


def default_folder() -> Path:
    """Folder of the vectors of the package moec-golden. CheckpointError when it is not there."""
    try:
        return Path(str(files("moec_golden") / "golden"))
    except ModuleNotFoundError:
        raise CheckpointError(
            "the golden files are a package of their own: install moec-golden (pip install "
            "moec_golden-*.whl, or ./bindings/golden of the repository), or give their folder "
            "(moec check --golden tests/golden)"
        ) from None


def find_files(folder: Path) -> list[Path]:
    """The files with a family, or the balancing loss, and those of quantised experts, there or in
    its folder "quant", in name order. CheckpointError when none."""
    def is_golden(path: Path) -> bool:
        file = SafetensorsFile(path)
        return bool({"family", "top_k"} & file.metadata.keys()) or golden_codes.is_golden(file)

    places = (folder, folder / "quant")
    found = [path for place in places for path in sorted(place.glob("*.safetensors"))
             if is_golden(path)]
    if not found:
        raise CheckpointError(f"{folder}: no golden file (*.safetensors with a family or a format)")
    return found


def check_file(context: Context, path: Path) -> Report:
    """Run one golden file through the public API, on the context's device."""
    file = SafetensorsFile(path)
    started = time.perf_counter()
    limits, kind = dict[str, float](), ""
    if golden_codes.is_golden(file):
        errors, kind = {}, golden_codes.read(file).kinds or "plain"
        for name, got, ref, limit in golden_codes.pairs(context, file):
            errors[name] = row_error(got, ref)
            if limit is not None:
                limits[name] = limit
    elif "family" in file.metadata:
        errors = {n: row_error(*both) for n, *both in _layer_pairs(context, Checkpoint(path))}
    else:
        errors = {n: row_error(*both) for n, *both in _loss_pairs(context, file)}
    return Report(path.stem, errors, time.perf_counter() - started, limits, kind)


def _layer_pairs(
    context: Context, golden: Checkpoint
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    spec = read_layer(golden, save=Save.ALL)
    with_weights = MoeLayer(context, spec, frozen=False)
    result = with_weights.forward(golden["x"])
    yield "y", np.asarray(result.y), golden["y"]
    got = with_weights.backward(result, golden["dout"])
    for name in golden:
        if name.startswith("g."):
            ref = golden[name]
            key = "x" if name == "g.x" else f"p.{name[2:]}"
            if key not in got:
                raise CheckpointError(f"{golden.path}: no gradient of {name[2:]} was computed")
            yield name[2:], _pad(got[key], ref), ref


def _pad(value: Any, ref: np.ndarray) -> np.ndarray:
    """The gradient in the reference's shape: rows of identity experts are exactly 0."""
    array = np.asarray(value).reshape(-1, *ref.shape[1:])
    if len(array) < len(ref):
        array = np.concatenate([array, np.zeros_like(ref[len(array) :])])
    return array.reshape(ref.shape)


def _loss_pairs(
    context: Context, file: SafetensorsFile
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    loss = Loss(kind=LossKind.BALANCE_MIXTRAL, top_k=int(file.metadata["top_k"]))
    logits = [context.asarray(np.array(file[f"logits.{i}"])) for i in range(2)]
    tokens = context.asarray(file["mask"].astype(np.uint8))
    for case, mask in (("nomask", None), ("mask", tokens)):
        value = np.asarray(loss(context, logits, token_mask=mask))
        yield ("y" if case == "nomask" else "y.mask"), value, file[f"{case}.loss"]
        for i, grad in enumerate(loss.backward(context, logits, token_mask=mask)):
            yield f"{case}.{i}", np.asarray(grad), file[f"{case}.g.{i}"]
