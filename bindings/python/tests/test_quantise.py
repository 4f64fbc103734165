# SPDX-License-Identifier: Apache-2.0
"""quantise: the bytes of the libraries that define the formats, and codes that Weights.of takes.
Shown once to fail: rows and columns of an IN_OUT array exchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moec
from moec.checkpoint import SafetensorsFile

FORMATS = Path(__file__).parents[3] / "tests/golden/formats"


@pytest.mark.skipif(not FORMATS.is_dir(), reason="needs the source tree")
@pytest.mark.parametrize(
    ("name", "dtype", "options", "codes", "scales"),
    [
        ("bnb_nf4_b64_stack", "bf16", {"kind": "nf4"}, "weight", "absmax"),
        ("ct_mxfp4", "f32", {"kind": "mxfp4"}, "weight_packed", "weight_scale"),
        ("ct_int4_g32_asym", "f32", {"kind": "int4", "block_k": 32, "asymmetric": True},
         "weight_packed", "weight_scale"),
        ("ct_int8_channel", "f32", {"kind": moec.QuantiseKind.INT8}, "weight", "weight_scale"),
    ],
)
def test_bytes_are_the_librarys(
    context: moec.Context, name: str, dtype: str, options: dict[str, Any], codes: str, scales: str
) -> None:
    file = SafetensorsFile(FORMATS / f"{name}.safetensors")
    values = file["w"].astype(moec.numpy_dtype(dtype))
    made = moec.quantise(context, values, **options)

    def stored(part: str) -> bytes:
        keys = [part] if part in file else [f"{e}.{part}" for e in range(len(values))]
        return b"".join(file[key].tobytes() for key in keys)

    assert made.codes.tobytes() == stored(codes)
    assert made.quant.scales.tobytes() == stored(scales)
    if made.quant.zeros is not None:
        assert made.quant.zeros.tobytes() == stored("weight_zero_point")


def test_codes_are_those_of_out_in(context: moec.Context) -> None:
    values = np.random.default_rng(3).normal(size=(2, 6, 40)).astype(np.float32)
    turned = np.ascontiguousarray(values.transpose(0, 2, 1))
    made = moec.quantise(context, values, "fp8", scale_dtype="f32")
    other = moec.quantise(context, turned, "fp8", orientation=moec.Orientation.IN_OUT)
    assert made.codes.tobytes() == other.codes.tobytes()
    assert made.quant.scales.shape == (2, 6, 1)


def test_weights_take_them(context: moec.Context) -> None:
    draw = np.random.default_rng(4)
    up = moec.quantise(context, draw.normal(size=(3, 32, 16)).astype(np.float32), "int8")
    down = moec.quantise(context, draw.normal(size=(3, 16, 16)).astype(np.float32), "int8")
    weights = moec.Weights.of(context, scheme=up.scheme, dtype="f32", **up.named("gate_up"),
                              **down.named("down"))
    assert weights.info().is_bound


def test_what_is_wrong_is_said(context: moec.Context) -> None:
    with pytest.raises(ValueError, match="2 dimensions; 3 are needed"):
        moec.quantise(context, np.zeros((4, 4), np.float32), "int8")
    with pytest.raises(moec.ShapeError, match="in_features is 40; mxfp4 needs a multiple of 32"):
        moec.quantise(context, np.zeros((1, 4, 40), np.float32), "mxfp4")
    with pytest.raises(ValueError, match="kind is 'nf5'; int8, int4"):
        moec.quantise(context, np.zeros((1, 4, 40), np.float32), "nf5")
