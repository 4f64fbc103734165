# SPDX-License-Identifier: Apache-2.0
"""Adapters that PEFT wrote of transformers 4, a pair for each expert's linear layer, through PEFT's
own loader on moec: the numbers of W + s B A of each expert. Shown once to fail: gate and up
exchanged, and half of the scale."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import HERE, build, tokens
from peft import IA3Config, PeftModel, get_peft_model
from safetensors.torch import save_file

import moec.transformers
from moec.transformers import _peft

LEAVES = {
    "qwen3_moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe.experts", ("w1", "w3", "w2")),
}
RANK, ALPHA = 3, 6


def stacks_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_apply_gate")]


def write_v4(folder: Path, family: str, model: Any, **more: Any) -> list[dict[str, torch.Tensor]]:
    """A file of it; of each layer the sum B A of gate_up_proj and of down_proj, unscaled."""
    path, leaves = LEAVES[family]
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, torch.Tensor] = {}
    added = []
    for layer, experts in enumerate(stacks_of(model)):
        count, hidden, inter = experts.down_proj.shape
        products: dict[str, torch.Tensor] = {}
        for leaf, (inner, outer) in zip(
            leaves, ((hidden, inter), (hidden, inter), (inter, hidden)), strict=True
        ):
            a = torch.randn((count, RANK, inner), generator=generator) / 4
            b = torch.randn((count, outer, RANK), generator=generator) / 4
            products[leaf] = b @ a
            for e in range(count):
                key = f"base_model.model.model.layers.{layer}.{path}.{e}.{leaf}"
                tensors[f"{key}.lora_A.weight"] = a[e].clone()
                tensors[f"{key}.lora_B.weight"] = b[e].clone()
        gate, up, down = (products[leaf] for leaf in leaves)
        added.append({"gate_up_proj": torch.cat([gate, up], 1), "down_proj": down})
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(leaves),
              "peft_version": "0.17.1", "bias": "none", "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config | more))
    return added


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens(length=9)).logits
    return found


def merged(
    family: str, added: list[dict[str, torch.Tensor]], scale: float,
    sizes: dict[str, int] | None = None,
) -> torch.Tensor:
    """Logits of transformers' own code with s B A added to the matrices."""
    model = build(family, sizes=sizes)
    with torch.no_grad():
        for experts, products in zip(stacks_of(model), added, strict=True):
            for name, product in products.items():
                getattr(experts, name).add_(scale * product.to(HERE))
    return logits(model)


def loaded(family: str, folder: Path, sizes: dict[str, int] | None = None) -> Any:
    model = build(family, sizes=sizes)
    moec.transformers.enable(model)
    return PeftModel.from_pretrained(model, folder)


@pytest.mark.parametrize("inter", [24, 16, 32])
@pytest.mark.parametrize("family", LEAVES)
def test_single_experts(family: str, inter: int, tmp_path: Path) -> None:
    """Of square stacks, too: 16 makes gate_up_proj one, 32 down_proj. PEFT puts such factors
    together as it reads them now, whatever release wrote them."""
    sizes = {"moe_intermediate_size": inter, "intermediate_size": inter}
    plain = build(family, sizes=sizes)
    added = write_v4(tmp_path, family, plain)
    want = merged(family, added, ALPHA / RANK, sizes)
    assert not torch.allclose(logits(plain), want, rtol=1e-2, atol=1e-2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        model = loaded(family, tmp_path, sizes)
    assert torch.allclose(logits(model), want, rtol=1e-4, atol=1e-4)


def test_another_kind_of_adapter() -> None:
    """Of a config that targets no parameters."""
    model = get_peft_model(build("mixtral"), IA3Config(target_modules=["k_proj"],
                                                       feedforward_modules=[]))
    assert torch.isfinite(logits(model)).all()


@pytest.mark.parametrize("family", LEAVES)
def test_a_scale_of_rslora_warns(family: str, tmp_path: Path) -> None:
    """PEFT doubles rank and alpha of gate and up together, which is right without rslora alone."""
    added = write_v4(tmp_path, family, build(family), use_rslora=True)
    model = loaded(family, tmp_path)
    _peft._warned.clear()
    with pytest.warns(UserWarning, match=r"sqrt\(2\) times the trained"):
        got = logits(model)
    scale = ALPHA / RANK**0.5
    products = [{"gate_up_proj": 2**0.5 * one["gate_up_proj"], "down_proj": one["down_proj"]}
                for one in added]
    assert torch.allclose(got, merged(family, products, scale), rtol=1e-4, atol=1e-4)
