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
    assert raw - lists == ours | {"thisown", "struct_size"}
    kinds = {item.name: item.type for item in fields(moec.Quant)}
    assert lists == {f"per_expert_{n}" for n, kind in kinds.items() if "Matrix" in str(kind)}


QUANT = Path(__file__).parents[3] / "tests/golden/quant"


def parts_of(file: SafetensorsFile, suffix: str, names: dict[str, str]) -> dict[str, Any]:
    """Per-expert tensors of gate, up and down: the codes' suffix, and fields of Quant by suffix."""
    arrays: dict[str, Any] = {}
    for name in ("gate", "up", "down"):
        def part(end: str, name: str = name) -> Any:
            experts = range(4 if f"ckpt.experts.3.{name}_proj.{end}" in file else 2)
            return [file[f"ckpt.experts.{e}.{name}_proj.{end}"] for e in experts]

        arrays[name] = part(suffix)
        arrays[f"{name}_quant"] = {field: part(end) for field, end in names.items()}
    return arrays


CHECKPOINTS: dict[str, tuple[moec.Scheme, str, dict[str, str], dict[str, Any]]] = {
    "ct_int4_g32_asym": (moec.Scheme.INT4, "weight_packed",
                         {"scales": "weight_scale", "zeros": "weight_zero_point"},
                         {"block_k": 32}),
    "ct_nvfp4": (moec.Scheme.NVFP4, "weight_packed",
                 {"scales": "weight_scale", "scales2": "weight_global_scale"},
                 {"flags": moec.QuantFlags.SCALES2_DIVIDES}),
    "gptq_v1_asym_actorder": (moec.Scheme.GPTQ, "qweight",
                              {"scales": "scales", "zeros": "qzeros", "group_index": "g_idx"},
                              {"block_k": 32}),
    "awq_gemm_g32": (moec.Scheme.AWQ, "qweight", {"scales": "scales", "zeros": "qzeros"},
                     {"block_k": 32}),
    "fp8_block128_partial": (moec.Scheme.FP8, "weight", {"scales": "weight_scale_inv"},
                             {"block_n": 128, "block_k": 128}),
}


@pytest.mark.skipif(not QUANT.is_dir(), reason="needs the source tree")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_experts_of_a_checkpoint(context: moec.Context, name: str) -> None:
    scheme, codes, fields_, options = CHECKPOINTS[name]
    file = SafetensorsFile(QUANT / f"{name}.safetensors")
    arrays = parts_of(file, codes, fields_)
    for part in ("gate", "up", "down"):
        arrays[f"{part}_quant"] = moec.Quant(**arrays[f"{part}_quant"], **options)
    x, d_y = file["x"], file["dy"]
    turned = scheme in (moec.Scheme.GPTQ, moec.Scheme.AWQ)
    orientation = moec.Orientation.IN_OUT if turned else moec.Orientation.OUT_IN
    hidden, inter = x.shape[1], 144 if scheme == moec.Scheme.FP8 else I
    weights = moec.Weights.of(context, gate_layout=moec.GateLayout.SPLIT, dtype="f32",
                              gate_up_orientation=orientation, down_orientation=orientation,
                              scheme=scheme, hidden=hidden, inter=inter, **arrays)
    number, tokens = weights.desc.num_experts, len(x)
    experts = moec.Experts(context, moec.ExpertsDesc(
        hidden=hidden, inter=inter, num_experts=number, top_k=K, dtype="f32", save=moec.Save.ALL))
    plan = moec.Plan(context, moec.PlanDesc(max_tokens=tokens, num_experts=number, top_k=K))
    result = experts.forward(plan.from_topk(file["ids"], file["weights"]), x, weights)
    grads = experts.backward(result, d_y)
    assert_close(result.y, file["ref.y"], 1e-5)
    assert_close(grads.x, file["ref.dx"], 1e-5)
    assert_close(grads.routing_weights, file["ref.dweights"], 1e-5)
    down = np.stack([weights.dequantise(moec.MatrixName.DOWN, e) for e in range(number)])
    if turned:
        down = down.transpose(0, 2, 1)
    index = file["dequant.down_proj.index"]
    assert np.array_equal(down.reshape(-1)[index], file["dequant.down_proj.value"])


def test_packed_codes_need_sizes(context: moec.Context) -> None:
    codes = np.zeros(E * H * I // 2, np.uint8)
    with pytest.raises(TypeError, match=r"hidden and inter and num_experts missing"):
        moec.Weights.of(context, down=codes, down_quant=moec.Quant(), up=codes,
                        up_quant=moec.Quant(), scheme=moec.Scheme.CODEBOOK4, dtype="f32")


INT8, FP8, NONE = moec.Scheme.INT8, moec.Scheme.FP8, moec.Scheme.NONE
PLAIN_DOWN = "down_scheme is FP8, but down_quant is None, so down would be plain; give down_quant"
MISMATCHED: dict[str, tuple[dict[str, moec.Scheme], tuple[str, ...]]] = {
    "scheme is INT8, but no matrix has a Quant, so all would be plain": ({"scheme": INT8}, ()),
    "scheme is FP8, but no matrix has a Quant": ({"scheme": FP8, "down_scheme": NONE}, ()),
    PLAIN_DOWN: ({"down_scheme": FP8}, ()),
    "down_scheme is FP8, but down_quant is None": ({"scheme": INT8, "down_scheme": FP8}, ("up",)),
    "scheme is INT8, but only down has a Quant, with down_scheme INT8, so gate and up would": (
        {"scheme": INT8, "down_scheme": INT8}, ("down",)),
    "up_quant given, but scheme is NONE; give the scheme": ({}, ("up",)),
    "gate_quant and up_quant given, but scheme is NONE": (
        {"down_scheme": INT8}, ("gate", "up", "down")),
    "down_quant given, but scheme is NONE": ({}, ("down",)),
    "down_quant given, but down_scheme is NONE": (
        {"scheme": INT8, "down_scheme": NONE}, ("up", "down")),
}


def of_parts(context: moec.Context, coded: tuple[str, ...], **schemes: Any) -> moec.Weights:
    """Separate gate and up, of which some are INT8 codes."""
    given: dict[str, Any] = {}
    for name, shape in {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}.items():
        given[name] = np.zeros(shape, np.int8 if name in coded else np.float32)
        if name in coded:
            given[f"{name}_quant"] = moec.Quant(scales=np.ones((*shape[:2], 1), np.float32))
    return moec.Weights.of(context, gate_layout=moec.GateLayout.SPLIT, dtype="f32",
                           **schemes, **given)


@pytest.mark.parametrize("text", MISMATCHED)
def test_a_scheme_and_a_quant_belong_together(context: moec.Context, text: str) -> None:
    schemes, coded = MISMATCHED[text]
    with pytest.raises(TypeError, match=f"moec.Weights.of: {text}"):
        of_parts(context, coded, **schemes)


@pytest.mark.parametrize(("schemes", "coded", "held"), [
    ({}, (), (NONE, NONE)),
    ({"scheme": NONE, "down_scheme": NONE}, (), (NONE, NONE)),
    ({"scheme": INT8}, ("gate", "up"), (INT8, NONE)),
    ({"scheme": INT8, "down_scheme": NONE}, ("gate", "up"), (INT8, NONE)),
    ({"scheme": INT8}, ("down",), (NONE, INT8)),
    ({"down_scheme": INT8}, ("down",), (NONE, INT8)),
    ({"scheme": INT8}, ("gate", "up", "down"), (INT8, INT8)),
])
def test_either_side_may_be_plain(
    context: moec.Context, schemes: dict[str, moec.Scheme], coded: tuple[str, ...],
    held: tuple[moec.Scheme, moec.Scheme],
) -> None:
    desc = of_parts(context, coded, **schemes).desc
    assert (desc.gate_up_scheme, desc.down_scheme) == held


def test_gate_and_up_are_both_codes(context: moec.Context) -> None:
    with pytest.raises(moec.MoecError, match="gate has dtype f32; expected i8"):
        of_parts(context, ("up",), scheme=INT8)
