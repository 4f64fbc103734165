# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of AWQ and GPTQ: experts stay packed, with the values of the formats' formulas.
Stand-ins for the quantisers' libraries, which compile kernels for a GPU, leave the rest of a
model plain."""

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
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_awq import AwqQuantizer
from transformers.quantizers.quantizer_gptq import GptqHfQuantizer

import moec.transformers
from moec.transformers import _load

GROUP = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
LEAVES = ("gate_proj", "up_proj", "down_proj")
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm",
            "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq"},
    "gptq-v2": {"quant_method": "gptq", "bits": 4, "group_size": GROUP,
                "checkpoint_format": "gptq_v2"},
    "act-order": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True,
                  "checkpoint_format": "gptq"},
}


def packed(values: torch.Tensor, dim: int, order: Any = range(8)) -> torch.Tensor:
    """Eight codes in a word along a dimension: code order[i] at the bits 4 i."""
    parts = values.movedim(dim, -1).unflatten(-1, (-1, 8))
    words = sum(parts[..., code].long() << (4 * place) for place, code in enumerate(order))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int().movedim(-1, dim)


def quantised(name: str, rows: int, columns: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A random matrix [rows,columns] as the file has it, and its values."""
    codes, zeros = (torch.randint(0, 16, (n, rows)) for n in (columns, columns // GROUP))
    zeros = zeros.clamp(min=1)  # version 1 of GPTQ stores one less
    scales = (0.02 * (torch.rand(columns // GROUP, rows) + 0.5)).half()
    group = torch.arange(columns) // GROUP
    if name == "act-order":
        group = group[torch.randperm(columns)]
    values = (scales[group].float() * (codes - zeros[group])).half().float().T.contiguous()
    if name == "awq":
        return {"qweight": packed(codes, 1, _AWQ_ORDER), "qzeros": packed(zeros, 1, _AWQ_ORDER),
                "scales": scales}, values
    stored = zeros if name == "gptq-v2" else zeros - 1
    return {"qweight": packed(codes, 0), "qzeros": packed(stored, 1), "scales": scales,
            "g_idx": group.int()}, values


@pytest.fixture(autouse=True)
def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(self: Any, config: Any, **more: Any) -> None:
        HfQuantizer.__init__(self, config, **more)

    monkeypatch.setattr(GptqHfQuantizer, "__init__", begin)
    for kind in (AwqQuantizer, GptqHfQuantizer):
        monkeypatch.setattr(kind, "validate_environment", lambda self, *_, **__: None)
        monkeypatch.setattr(kind, "is_trainable", True)
        monkeypatch.setattr(kind, "_process_model_before_weight_loading", lambda self, m, **_: m)
        monkeypatch.setattr(kind, "_process_model_after_weight_loading",
                            _load._loaded(lambda self, model, **_: model))


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_from_the_file(name: str, tmp_path: Path) -> None:
    torch.manual_seed(9)
    build("qwen3_moe", sizes=SIZES).save_pretrained(tmp_path)
    file, found, values = tmp_path / "model.safetensors", {}, {}
    for key, value in load_file(file).items():
        if ".experts." not in key:
            found[key] = value
            continue
        stored, values[key] = quantised(name, *value.shape)
        found |= {key.removesuffix("weight") + n: t.contiguous() for n, t in stored.items()}
    save_file(found, file, {"format": "pt"})
    text = tmp_path / "config.json"
    text.write_text(json.dumps(json.loads(text.read_text())
                               | {"quantization_config": CONFIGS[name]}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(row.is_packed for row in moec.transformers.report(model))
    for layer, module in enumerate(experts(model)):
        halves = module.gate_up_proj.dequantise().chunk(2, 1)
        for leaf, got in zip(LEAVES, (*halves, module.down_proj.dequantise()), strict=True):
            for e, one in enumerate(got):
                key = f"model.layers.{layer}.mlp.experts.{e}.{leaf}.weight"
                assert torch.equal(one.half().float(), values[key]), key  # in fp16, one rounding
    want = model(tokens()).logits
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[n], t) for n, t in found.items() if ".experts." in n)
    build("qwen3_moe", sizes=SIZES).save_pretrained(tmp_path / "plain")
    save_file(load_file(tmp_path / "plain" / "model.safetensors") | values,
              tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    torch.testing.assert_close(want, plain(tokens()).logits, rtol=5e-3, atol=5e-3)
    adapted = get_peft_model(model, LoraConfig(
        r=4, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"]))
    losses = train(adapted, rate=0.5)
    assert losses[0] > losses[2]
