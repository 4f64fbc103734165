# SPDX-License-Identifier: Apache-2.0
"""transformers' FP8Experts on moec, through their own registry: as plain experts of the values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import build
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers.integrations import finegrained_fp8
from transformers.integrations.moe import use_experts_implementation

import moec.transformers
from moec.golden import row_error

BLOCK = (32, 32)


def pair(hidden: int, inter: int) -> tuple[Any, Any]:
    """FP8Experts and the plain experts of their values, in fp32."""
    sizes = {"hidden_size": hidden, "moe_intermediate_size": inter, "head_dim": 16}
    plain = build("qwen3_moe", sizes=sizes).model.layers[0].mlp.experts
    made: Any = use_experts_implementation(
        experts_class=finegrained_fp8.FP8Experts,
        experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS, has_bias=False, has_gate=True,
    )
    plain.config.dtype = torch.float32
    coded = made(config=plain.config, block_size=BLOCK)
    generator = torch.Generator().manual_seed(4)
    for name in ("gate_up_proj", "down_proj"):
        codes, scales = getattr(coded, name), getattr(coded, f"{name}_scale_inv")
        with torch.no_grad():
            codes.copy_(torch.randn(codes.shape, generator=generator))
            scales.copy_(0.1 + 0.1 * torch.rand(scales.shape, generator=generator))
            wide = scales.repeat_interleave(BLOCK[0], 1).repeat_interleave(BLOCK[1], 2)
            values = codes.float() * wide[:, : codes.shape[1], : codes.shape[2]]
            getattr(plain, name).copy_(values)
    return coded, plain


@pytest.mark.parametrize("sizes", [(64, 64), (48, 40)], ids=["whole", "partial blocks"])
def test_as_plain_experts(sizes: tuple[int, int]) -> None:
    coded, plain = pair(*sizes)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(11, sizes[0], generator=generator)
    ids = torch.rand(11, 8, generator=generator).topk(3).indices
    weights = torch.rand(11, 3, generator=generator)
    found = []
    for module, implementation in ((coded, "moec"), (plain, "eager")):
        module.config._experts_implementation_internal = implementation
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        y = module(leaves[0], ids, leaves[1])
        y.square().sum().backward()
        found.append([t.detach().numpy() for t in (y, leaves[0].grad, leaves[1].grad)])
    for got, want in zip(*found, strict=True):
        assert row_error(got, want) <= 2e-5
    with torch.no_grad():  # the comparison can fail
        coded.down_proj_scale_inv[:, 0] *= 2
        coded.config._experts_implementation_internal = "moec"
        assert row_error(coded(x, ids, weights).numpy(), found[1][0]) > 1e-2
    rows = moec.transformers.report(coded)
    assert [row.kind for row in rows] == ["fp8-block"] * 2


def test_adapters() -> None:
    """PEFT's adapters of codes are terms beside the values, as of plain experts."""
    found = []
    for module, implementation in zip(pair(64, 64), ("moec", "eager"), strict=True):
        module.config._experts_implementation_internal = implementation
        outer = nn.Module()
        outer.experts = module.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(
            r=4, target_modules=[],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"]), outer)
        generator = torch.Generator().manual_seed(6)
        for name, parameter in outer.named_parameters():
            if "lora_" in name:
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
        x = torch.randn(11, 64, generator=generator).requires_grad_()
        ids = torch.rand(11, 8, generator=generator).topk(3).indices
        y = outer.experts(x, ids, torch.rand(11, 3, generator=generator))
        leaves = [x, *(p for p in outer.parameters() if p.requires_grad)]
        assert len(leaves) == 5
        grads = torch.autograd.grad(y.square().sum(), leaves)
        found.append([t.detach().numpy() for t in (y, *grads)])
    for got, want in zip(*found, strict=True):
        assert row_error(got, want) <= 2e-5
