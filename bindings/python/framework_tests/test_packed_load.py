# SPDX-License-Identifier: Apache-2.0
"""Experts in four bits: from_pretrained with bitsandbytes' config, training, checkpoints."""

from __future__ import annotations

import copy
import gc
import io
import json
import math
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from models import HERE, CallCount, tokens
from packed_models import STACKS, dense_twin, experts, load, saved, train
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import moec.transformers
from moec.torch._packed import PackedTensor

FAMILIES = ["qwen3_moe", "gpt_oss", "mixtral"]
_WITHOUT_MOEC = """
import sys, torch
from transformers import AutoModelForCausalLM
tokens, *places = sys.argv[1:]
for place in places[::2]:
    model, info = AutoModelForCausalLM.from_pretrained(place, output_loading_info=True)
    assert not any(info.values()), info
    torch.save(model(torch.load(tokens)).logits, place + "/logits.pt")
for place in places[1::2]:
    try:
        AutoModelForCausalLM.from_pretrained(place)
    except Exception as error:
        print(type(error).__name__, "mismatched_sizes" in str(error))
assert "moec" not in sys.modules
"""


def loss_and_gradients(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return float(loss), found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("nested", [False, True])
def test_loads_packed_and_trains_as_the_same_values(
    family: str, nested: bool, tmp_path: Path
) -> None:
    place = saved(tmp_path, family, torch.float32)
    model = load(place, torch.float32, bnb_4bit_use_double_quant=nested)
    names = {f".{part}" for name in STACKS
             for part in getattr(experts(model)[0], name).parts if part}
    assert any("nested" in name for name in names) == nested
    twin = dense_twin(model, place, torch.float32, bnb_4bit_use_double_quant=nested)
    assert model.hf_quantizer.is_trainable
    with CallCount() as count:  # a mode sends the call through the operator
        want, ours = twin(tokens()).logits, model(tokens()).logits
    assert count.calls == len(experts(model))
    torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-4)
    (got_loss, got), (want_loss, wanted) = map(loss_and_gradients, (model, twin))
    assert got_loss == pytest.approx(want_loss, rel=1e-5)
    stacks = {n for n in wanted if n.endswith(STACKS)}
    assert got.keys() == wanted.keys() - stacks
    for name, value in got.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-3, atol=1e-4)
    # The comparison can fail: one expert's scales changed.
    held = experts(model)[0].down_proj
    held.parts[".absmax"].flatten()[:4] += 9
    assert not torch.equal(model(tokens()).logits, ours)


def test_the_config_as_it_comes(tmp_path: Path) -> None:
    """load_in_4bit and nothing else is FP4: packed, trained, and the same after saving."""
    place = saved(tmp_path, "qwen3_moe")
    config = BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModelForCausalLM.from_pretrained(place, quantization_config=config, device_map=HERE)
    held = experts(model)[0].down_proj
    assert ".quant_state.bitsandbytes__fp4" in held.parts
    assert all(row.is_packed for row in moec.transformers.report(model))
    loss, found = loss_and_gradients(model)
    assert math.isfinite(loss) and found and all(g.isfinite().all() for g in found.values())
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", device_map=HERE)
    assert torch.equal(experts(again)[0].down_proj.dequantise(), held.dequantise())


def test_one_merged_stack_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When one is quantised, no other has its plain values still."""
    functional = pytest.importorskip("bitsandbytes.functional")
    quantise, stacks, alive = functional.quantize_4bit, list[Any](), list[int]()

    def recorded(values: torch.Tensor, *args: Any, **more: Any) -> Any:
        if values.dim() == 3:
            gc.collect()
            alive.append(sum(held() is not None for held in stacks))
            stacks.append(weakref.ref(values))
        return quantise(values, *args, **more)

    monkeypatch.setattr(functional, "quantize_4bit", recorded)
    model = load(saved(tmp_path, "qwen3_moe"))
    assert alive == [0] * len(STACKS) * len(experts(model))


def test_three_steps_of_a_dense_part(tmp_path: Path) -> None:
    model = load(saved(tmp_path, "gpt_oss"), torch.float32)
    before = copy.deepcopy(experts(model)[0].down_proj)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    losses = train(model, rate=0.05)
    assert losses[0] > losses[1] > losses[2]
    after = experts(model)[0].down_proj
    assert all(torch.equal(after.parts[name], part) for name, part in before.parts.items())
    assert any("experts.down_proj_bias" in n and p.grad.abs().max() > 0
               for n, p in model.named_parameters() if p.grad is not None)


def test_skipped_experts_stay_plain(tmp_path: Path) -> None:
    place = saved(tmp_path, "qwen3_moe")
    plain = load(place, llm_int8_skip_modules=["experts"])
    assert not any(isinstance(p, PackedTensor) for p in plain.parameters())
    rows = moec.transformers.report(plain)
    assert len(rows) == 4 and all("skips experts" in row.why for row in rows)
    half = load(place, llm_int8_skip_modules=["down_proj", "lm_head"])
    assert [row.is_packed for row in moec.transformers.report(half)] == [True, False] * 2
    assert torch.isfinite(half(tokens()).logits).all()


def test_report(tmp_path: Path) -> None:
    rows = moec.transformers.report(load(saved(tmp_path, "qwen3_moe")))
    assert [row.kind for row in rows] == ["bnb"] * 4
    assert all(row.bytes < 0.32 * row.plain_bytes for row in rows)
    assert "4 of 4 stacks packed" in str(rows)


def test_parametrised_experts_are_served(tmp_path: Path) -> None:
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    place = saved(tmp_path, "gpt_oss", torch.float32)
    packed = load(place, torch.float32)
    other = load(place, torch.float32, llm_int8_skip_modules=["experts", "lm_head"])
    for module in experts(other):
        for name in STACKS:
            replace_parameter_4bit(module, name, compress_statistics=True, quant_type="nf4")
    moec.transformers.enable(other)
    assert {row.kind for row in moec.transformers.report(other)} == {"bnb"}
    torch.testing.assert_close(other(tokens()).logits, packed(tokens()).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_save_and_load(family: str, tmp_path: Path) -> None:
    model = load(saved(tmp_path, family))
    want = model(tokens()).logits
    for turn in ("once", "again"):
        model.save_pretrained(tmp_path / turn)
        names = load_file(tmp_path / turn / "model.safetensors")
        assert any(name.endswith("experts.down_proj.nested_absmax") for name in names)
        config = json.loads((tmp_path / turn / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == "moec-bitsandbytes"
        model = AutoModelForCausalLM.from_pretrained(tmp_path / turn, dtype=torch.bfloat16)
        assert torch.equal(model(tokens()).logits, want)


def test_without_moec(tmp_path: Path) -> None:
    """Another process loads merged checkpoints, and refuses the packed ones by their shapes: this
    transformers, and in a part of its own the oldest."""
    wanted, names = {}, ["tokens.pt"]
    for family in FAMILIES:
        model = load(saved(tmp_path, family))
        wanted[family] = model(tokens()).logits.cpu()
        place = tmp_path / f"{family}-merged"
        moec.transformers.save_merged(model, place, max_shard_bytes=200_000)
        assert (place / "model.safetensors.index.json").exists()
        model.save_pretrained(tmp_path / f"{family}-packed")
        names += [place.name, f"{family}-packed"]
    torch.save(tokens().cpu(), tmp_path / "tokens.pt")
    run = subprocess.run(
        [sys.executable, "-c", _WITHOUT_MOEC, *(str(tmp_path / name) for name in names)],
        capture_output=True, text=True)
    refused = len(FAMILIES) * "RuntimeError True\n"
    assert run.returncode == 0 and run.stdout == refused, run.stdout + run.stderr
    assert "Unknown quantization type, got moec-bitsandbytes" in run.stderr
    for family, logits in wanted.items():
        got = torch.load(tmp_path / f"{family}-merged" / "logits.pt")
        torch.testing.assert_close(got, logits, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_an_expert_that_was_not_consumed(change: str, tmp_path: Path) -> None:
    place = saved(tmp_path, "qwen3_moe")
    file = place / "model.safetensors"
    held = load_file(file)
    name = "model.layers.1.mlp.experts.3.down_proj"
    if change == "missing":
        held = {n: t for n, t in held.items() if "layers.1.mlp.experts" not in n
                or "down_proj" not in n}
    else:
        held[f"{name}.qweight"] = torch.zeros(4, 4)
    save_file(held, file, {"format": "pt"})
    with pytest.raises(RuntimeError, match="left random"):
        load(place)


def packed(tmp_path: Path) -> nn.Parameter:
    held: nn.Parameter = experts(load(saved(tmp_path, "qwen3_moe")))[0].down_proj
    return held


def test_the_tensor(tmp_path: Path) -> None:
    held = packed(tmp_path)
    assert isinstance(held, nn.Parameter) and isinstance(held, PackedTensor)
    values = held.dequantise()
    assert type(values) is torch.Tensor and values.shape == held.shape == (8, 64, 64)
    assert torch.equal(held[3], values[3]) and torch.equal(held[-1], values[-1])
    assert torch.equal(held + 1, values + 1) and torch.equal(held.transpose(1, 2)[0], values[0].T)
    assert held.half().dtype == held.float().dtype == torch.bfloat16
    file = io.BytesIO()
    torch.save({"w": held}, file)
    file.seek(0)
    for other in (copy.deepcopy(held), torch.load(file)["w"], held.clone(), held.to("cpu")):
        assert isinstance(other, PackedTensor)
        assert torch.equal(other.dequantise().cpu(), values.cpu())
    assert isinstance(copy.deepcopy(held), nn.Parameter) and not held.requires_grad
    assert held.to("meta").device.type == "meta" and torch.empty_like(held).shape == held.shape
    held.data = held.data.to(torch.float32)  # what prepare_model_for_kbit_training() does
    assert torch.equal(held.dequantise(), values)
    with pytest.raises(RuntimeError, match="data pointer"):
        save_file({"w": held}, tmp_path / "file")


@pytest.mark.parametrize("write", [
    lambda w: w.add_(1), lambda w: w.data.mul_(2), lambda w: w.data.zero_(),
    lambda w: torch.add(w, 1, out=w), lambda w: w.data.copy_(torch.zeros(w.shape)),
    lambda w: torch._foreach_add_([w.data], 1), lambda w: setattr(w, "data", torch.zeros(w.shape)),
    lambda w: w.data.__iadd__(1), lambda w: w.data.index_add_(0, torch.tensor([0]), w[:1]),
])
def test_writes_raise(write: Any, tmp_path: Path) -> None:
    held = packed(tmp_path)
    before = held.dequantise()
    with pytest.raises(RuntimeError, match="moec: "):
        write(held)
    assert torch.equal(held.dequantise(), before)


def test_state_dict_and_conversions(tmp_path: Path) -> None:
    place = saved(tmp_path, "qwen3_moe")
    model = load(place)
    want = model(tokens()).logits
    other = load(place)
    experts(other)[0].down_proj.parts[""].zero_()
    assert not torch.equal(other(tokens()).logits, want)
    held = {n: v for n, v in model.state_dict().items() if ".experts." in n}
    other.load_state_dict(held, strict=False)
    assert torch.equal(other(tokens()).logits, want)
    assert torch.equal(copy.deepcopy(model)(tokens()).logits, want)
    module = experts(model)[0]
    codes = module.down_proj.parts[""]
    module.half().float()
    assert module.down_proj.parts[""] is codes and module.down_proj.dtype == torch.bfloat16
    module.down_proj.requires_grad_()
    with pytest.raises(RuntimeError, match="down_proj of Qwen3MoeExperts is packed and requires"):
        model(tokens())
