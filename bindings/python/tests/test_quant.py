# SPDX-License-Identifier: Apache-2.0
"""Experts of codes: y, d_x and d_routing_weights as PyTorch has them of the values that
compressed-tensors makes of a checkpoint's codes. Shown once to fail: scales of gate and up
exchanged."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import assert_close

import moec
from moec import _raw
from moec.checkpoint import SafetensorsFile

FILE = Path(__file__).parents[3] / "tests/golden/quant/ct_int8_channel.safetensors"
T, H, I, E, K = 10, 96, 32, 4, 2


def codes_of(file: SafetensorsFile, split: bool) -> dict[str, Any]:
    """The checkpoint's matrices, a list of one array per expert or stacked."""
    def part(name: str) -> Any:
        found = [file[f"ckpt.experts.{e}.{name}"] for e in range(E)]
        return found if split else np.stack(found)

    arrays: dict[str, Any] = {}
    for name in ("gate", "up", "down"):
        arrays[name] = part(f"{name}_proj.weight")
        arrays[f"{name}_quant"] = moec.Quant(scales=part(f"{name}_proj.weight_scale"))
    return arrays


@pytest.mark.skipif(not FILE.is_file(), reason="needs the source tree")
@pytest.mark.parametrize("split", [False, True], ids=["stacked", "split"])
@pytest.mark.parametrize(("dtype", "ref", "limit"), [("f32", "ref.", 1e-5),
                                                     ("bf16", "ref_lib.", 1e-2)])
def test_int8_experts(
    context: moec.Context, dtype: str, ref: str, limit: float, split: bool
) -> None:
    file = SafetensorsFile(FILE)
    weights = moec.Weights.of(context, gate_layout=moec.GateLayout.SPLIT, dtype=dtype,
                              scheme=moec.Scheme.INT8, **codes_of(file, split))
    experts = moec.Experts(context, moec.ExpertsDesc(
        hidden=H, inter=I, num_experts=E, top_k=K, dtype=dtype, save=moec.Save.ALL))
    plan = moec.Plan(context, moec.PlanDesc(max_tokens=T, num_experts=E, top_k=K))
    x, d_y = (file[name].astype(moec.numpy_dtype(dtype)) for name in ("x", "dy"))
    result = experts.forward(plan.from_topk(file["ids"], file["weights"]), x, weights)
    grads = experts.backward(result, d_y)
    assert_close(result.y, file[f"{ref}y"], limit)
    assert_close(grads.x, file[f"{ref}dx"], limit)
    assert_close(grads.routing_weights, file[f"{ref}dweights"], limit)
    assert grads.expert_weights == moec.WeightSet()  # codes have no gradient


def test_codes_and_scales_belong_together(context: moec.Context) -> None:
    down = np.zeros((E, H, I), np.int8)
    scales = [np.ones((H, 1), np.float32)] * E
    of: Any = {"gate_layout": moec.GateLayout.NONE, "scheme": moec.Scheme.INT8, "dtype": "f32",
               "up": down.transpose(0, 2, 1).copy(), "up_quant": moec.Quant(
                   scales=np.ones((E, I, 1), np.float32)), "down": down}
    moec.Weights.of(context, **of, down_quant=moec.Quant(scales=scales))  # stacked, with a list
    with pytest.raises(moec.InvalidArgumentError, match=r"down.quant.scales is absent"):
        moec.Weights.of(context, **of, down_quant=moec.Quant())
    with pytest.raises(moec.InvalidArgumentError, match=r"down.quant.codebook is given"):
        book = np.zeros(16, np.float32)
        moec.Weights.of(context, **of, down_quant=moec.Quant(scales=scales, codebook=book))
    with pytest.raises(ValueError, match=r"down has 4 arrays, down_quant.scales 3"):
        moec.Weights.of(context, **of | {"down": list(down)},
                        down_quant=moec.Quant(scales=scales[1:]))


def test_fields_are_the_headers() -> None:
    raw = {k for k, v in vars(_raw.moec_quant).items() if isinstance(v, property)}
    lists = {name for name in raw if name.startswith("per_expert_")}
    ours = {item.name for item in fields(moec.Quant)}
    assert raw - lists == ours | {"thisown", "struct_size", "flags"}
    kinds = {item.name: item.type for item in fields(moec.Quant)}
    assert lists == {f"per_expert_{n}" for n, kind in kinds.items() if "Matrix" in str(kind)}
