# SPDX-License-Identifier: Apache-2.0
"""The golden families through the public API: y and every gradient."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import moec
from moec import golden
from moec.checkpoint import Checkpoint, SafetensorsFile
from moec.model import MoeLayer, read_layer

FILES = golden.find_files(golden.default_folder())


def test_all_families_are_packaged() -> None:
    quantised = [path for path in FILES if path.parent.name == "quant"]
    assert len(quantised) == 19
    assert len([path for path in FILES if path.stem != "load_balancing_loss"]) == 34 + 19
    assert any(path.stem == "load_balancing_loss" for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_family(context: moec.Context, path: Path) -> None:
    report = golden.check_file(context, path)
    assert not report.faults
    compared = {name for name in SafetensorsFile(path) if name.startswith("g.")} \
        if path.stem != "load_balancing_loss" else set()
    if report.kind:
        values = [name for name in report.errors if name.startswith("values.")]
        assert len(values) == 4 and all(report.limit(name) == 0 for name in values)
    assert compared <= {f"g.{name}" for name in report.errors}


def test_a_gate_up_swap_is_seen(context: moec.Context, tmp_path: Path) -> None:
    """The check itself can fail: gate and up of one expert exchanged must be reported."""
    source = next(path for path in FILES if path.stem == "qwen3_moe")
    checkpoint = Checkpoint(source)
    spec = read_layer(checkpoint, save=moec.Save.ALL)
    swapped = np.array(spec.matrices.arrays.gate_up)
    half = swapped.shape[1] // 2
    swapped[3] = np.concatenate([swapped[3, half:], swapped[3, :half]])
    spec.matrices.arrays.gate_up = swapped
    layer = MoeLayer(context, spec, frozen=False)
    result = layer.forward(checkpoint["x"])
    assert golden.row_error(np.asarray(result.y), checkpoint["y"]) > 1e-2


def test_row_error_sees_one_bad_row() -> None:
    ref = np.ones((100, 8))
    got = ref.copy()
    got[50, 0] += 1e-3
    assert golden.row_error(got, ref) == pytest.approx(1e-3 / 8**0.5)
    got[50, 0] = np.nan
    assert not golden.row_error(got, ref) <= 1.0
