# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of compressed-tensors, made by its own compressors: experts stay packed, have the
values that the library decompresses, and adapters train over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, tokens
from packed_models import SIZES, experts, train
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import moec.transformers
from moec.torch._packed import PackedTensor

pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # noqa: E402
from compressed_tensors.quantization.utils import calculate_qparams  # noqa: E402

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": True,
                                "strategy": "group", "group_size": 32}),
    "int4-asym": ("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": False,
                                     "strategy": "group", "group_size": 32}),
    "int8": ("int-quantized", {"num_bits": 8, "type": "int", "symmetric": True,
                               "strategy": "channel"}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "symmetric": True,
                                "strategy": "channel"}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "symmetric": True,
                                       "strategy": "tensor_group", "group_size": 16,
                                       "scale_dtype": "torch.float8_e4m3fn"}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "symmetric": True,
                                       "strategy": "group", "group_size": 32,
                                       "scale_dtype": "torch.uint8"}),
}


def quantised(
    name: str, weight: torch.Tensor, global_scale: float
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What the library stores of a matrix, and the values that it makes of it."""
    form, options = FORMATS[name]
    args = QuantizationArgs(**options)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    group = options.get("group_size", weight.shape[1])
    blocks = weight.view(len(weight), -1, group)
    more = {}
    if name == "nvfp4":
        more["global_scale"] = torch.tensor([global_scale])
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, **more)
    state = {"weight": weight.clone(), "weight_scale": scale}
    if not args.symmetric:
        state["weight_zero_point"] = zero
    if more:
        state["weight_global_scale"] = more["global_scale"]
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(dict(state), scheme)
    return stored, compressor.decompress(dict(stored), scheme)["weight"]


def checkpoint(folder: Path, family: str, name: str) -> dict[str, torch.Tensor]:
    """A checkpoint with quantised experts; the values of their matrices by name."""
    build(family, sizes=SIZES).save_pretrained(folder)
    file, found, values = folder / "model.safetensors", {}, {}
    for index, (key, value) in enumerate(load_file(file).items()):
        if ".experts." not in key:
            found[key] = value
            continue
        stored, values[key] = quantised(name, value, 1000.0 + 7 * (index % 5))
        found |= {key.removesuffix("weight") + n: t.contiguous() for n, t in stored.items()}
        if name == "nvfp4":  # of activations, which nobody reads
            found[key.removesuffix("weight") + "input_global_scale"] = torch.ones(1)
    save_file(found, file, {"format": "pt"})
    form, options = FORMATS[name]
    group = {"targets": [r"re:.*experts.*_proj", r"re:.*experts.*w\d"], "weights": options,
             "format": form}
    text = folder / "config.json"
    text.write_text(json.dumps(json.loads(text.read_text()) | {"quantization_config": {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "quantization_status": "compressed", "ignore": ["lm_head"]}}))
    return values


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("name", FORMATS)
def test_packed_from_the_file(name: str, family: str, tmp_path: Path) -> None:
    values = checkpoint(tmp_path, family, name)
    model = load(tmp_path)
    assert all(row.is_packed for row in moec.transformers.report(model))
    leaves = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    for layer, module in enumerate(experts(model)):
        halves = module.gate_up_proj.dequantise().chunk(2, 1)
        for leaf, got in zip(leaves, (*halves, module.down_proj.dequantise()), strict=True):
            keys = [k for k in values if f"layers.{layer}." in k and f".{leaf}." in k]
            assert len(keys) == 8
            for e, one in enumerate(got):
                (key,) = (k for k in keys if f".experts.{e}." in k)
                want = values[key]  # of four-bit floats in bf16, one rounding of ours
                torch.testing.assert_close(one.to(want.dtype), want, rtol=1e-5, atol=1e-7)
    adapted = get_peft_model(model, LoraConfig(
        r=4, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"]))
    losses = train(adapted, rate=0.5)
    assert losses[0] > losses[2]


def test_the_whole_model_and_saving(tmp_path: Path) -> None:
    values = checkpoint(tmp_path / "packed", "qwen3_moe", "int4")
    model = load(tmp_path / "packed")
    build("qwen3_moe", sizes=SIZES).save_pretrained(tmp_path / "plain")
    file = tmp_path / "plain" / "model.safetensors"
    plain_values = {key: value.float() for key, value in values.items()}
    save_file(load_file(file) | plain_values, file, {"format": "pt"})
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    want = model(tokens()).logits
    torch.testing.assert_close(want, plain(tokens()).logits, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path / "again")
    old, new = (load_file(tmp_path / at / "model.safetensors") for at in ("packed", "again"))
    assert all(torch.equal(new[n], t) for n, t in old.items() if ".experts." in n)
    assert torch.equal(load(tmp_path / "again")(tokens()).logits, want)


@pytest.mark.parametrize("suffix", ["weight_packed", "weight_scale"])
def test_a_tensor_that_is_not_there_is_an_error(suffix: str, tmp_path: Path) -> None:
    checkpoint(tmp_path, "qwen3_moe", "int4")
    file = tmp_path / "model.safetensors"
    held = load_file(file)
    del held[f"model.layers.1.mlp.experts.3.up_proj.{suffix}"]
    save_file(held, file, {"format": "pt"})
    with pytest.raises(RuntimeError):
        load(tmp_path)
    held[f"model.layers.1.mlp.experts.3.up_proj.{suffix}_more"] = torch.zeros(2)
    save_file(held, file, {"format": "pt"})
    with pytest.raises(RuntimeError):
        load(tmp_path)


def test_dequantize_asks_for_plain_experts(tmp_path: Path) -> None:
    checkpoint(tmp_path, "qwen3_moe", "int4")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["dequantize"] = True
    file.write_text(json.dumps(config))
    model = load(tmp_path)
    assert not any(isinstance(p, PackedTensor) for p in model.parameters())


def test_a_layer_of_plain_experts(tmp_path: Path) -> None:
    values = checkpoint(tmp_path, "qwen3_moe", "int4")
    file = tmp_path / "model.safetensors"
    held = {n: t for n, t in load_file(file).items() if "layers.1.mlp.experts" not in n}
    plain = {n: t for n, t in values.items() if "layers.1.mlp.experts" in n}
    save_file(held | plain, file, {"format": "pt"})
    model = load(tmp_path)
    assert [row.is_packed for row in moec.transformers.report(model)] == [True] * 2 + [False] * 2
    one = experts(model)[1].gate_up_proj[3]
    names = [f"model.layers.1.mlp.experts.3.{leaf}_proj.weight" for leaf in ("gate", "up")]
    assert torch.equal(one, torch.cat([values[name] for name in names]))
