# SPDX-License-Identifier: Apache-2.0
"""What hangs on the modules of a model, or is put around them, after and before enable(): hooks,
accelerate's offload, FSDP2, adapters. Llama-4, whose block moec replaces, does what eager does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from models import LAYERS, CallCount, build, tokens
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrize

import moec.transformers

ORDERS = ["enable first", "enable last"]


def of_class(model: nn.Module, end: str) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith(end)]


def changed(model: Any, change: Any, order: str) -> Any:
    """The model, which `change` gets before or after enable()."""
    if order == "enable first":
        moec.transformers.enable(model)
    change(model)
    if order == "enable last":
        assert len(moec.transformers.enable(model)) == LAYERS
    return model


def compare(model: Any, expected: Tensor) -> None:
    with torch.no_grad(), CallCount() as count:
        got = model(tokens()).logits
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert count.calls == LAYERS


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", ["llama4", "qwen3_moe", "gpt_oss"])
def test_forward_hooks(family: str, order: str) -> None:
    """They run, see what the module gets, and what they return counts."""
    seen: list[str] = []

    def hang(model: nn.Module) -> None:
        for end in ("Experts", "Llama4TextMoe"):
            for module in of_class(model, end):
                module.register_forward_pre_hook(lambda m, _, end=end: seen.append(f"pre {end}"))
                module.register_forward_hook(lambda m, i, y, end=end: seen.append(end))

    expected = build(family)(tokens()).logits.detach()
    model = changed(build(family), hang, order)
    compare(model, expected)
    ends = ("Experts", "Llama4TextMoe")[: 1 + (family == "llama4")]
    assert sorted(seen) == sorted([*ends, *(f"pre {end}" for end in ends)] * LAYERS)
    for module in of_class(model, "Experts"):
        module.register_forward_hook(lambda m, i, y: 2 * y)
    assert not torch.allclose(model(tokens()).logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", ["llama4", "qwen3_moe"])
def test_accelerates_offload(family: str, order: str, tmp_path: Path) -> None:
    """The blocks' weights lie on the disk until their module runs."""
    block = {"llama4": "feed_forward", "qwen3_moe": "mlp"}[family]

    def offload(model: Any) -> None:
        places = {name: "disk" if name.endswith(f".{block}") else "cpu"
                  for name, module in model.named_modules()
                  if name.endswith((f".{block}", "self_attn", "norm"))
                  or name in ("model.embed_tokens", "model.rotary_emb", "lm_head")}
        accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path),
                                  force_hooks=True)

    expected = build(family)(tokens()).logits.detach()
    model = changed(build(family), offload, order)
    assert all(m.down_proj.is_meta for m in of_class(model, "Experts"))
    compare(model, expected)


@pytest.fixture
def one_rank() -> Iterator[Any]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", ["llama4", "qwen3_moe"])
def test_sharded_experts(family: str, order: str, one_rank: Any) -> None:
    def shard(model: nn.Module) -> None:
        for module in of_class(model, "Experts"):
            fully_shard(module, mesh=one_rank)
        fully_shard(model, mesh=one_rank)

    expected = build(family)(tokens()).logits.detach()
    compare(changed(build(family), shard, order), expected)


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 0.5 * weight


class Adapted(nn.Module):
    """As adapters of parameters are: a module around the experts changes a parameter while they
    run."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.base_layer = experts

    def forward(self, x: Tensor, *args: Any) -> Any:
        parametrize.register_parametrization(self.base_layer, "down_proj", Half())
        try:
            return self.base_layer(x, *args)
        finally:
            parametrize.remove_parametrizations(self.base_layer, "down_proj", False)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", ["llama4", "qwen3_moe"])
def test_adapted_experts(family: str, order: str) -> None:
    def adapt(model: nn.Module) -> None:
        for module in list(model.modules()):
            if type(getattr(module, "experts", None)).__name__.endswith("Experts"):
                module.experts = Adapted(module.experts)

    eager, model = build(family), build(family)
    plain = eager(tokens()).logits.detach()
    adapt(eager)
    expected = eager(tokens()).logits.detach()
    assert not torch.allclose(plain, expected, rtol=1e-2, atol=1e-2)
    compare(changed(model, adapt, order), expected)


def test_a_forward_of_somebody_else() -> None:
    """It would be lost: nothing is changed."""
    model = build("llama4")
    block = of_class(model, "Llama4TextMoe")[-1]
    block.forward = lambda x, own=block.forward: own(2 * x)
    with pytest.raises(NotImplementedError, match="layers.1.feed_forward has the forward <func"):
        moec.transformers.enable(model)
    assert all("forward" not in vars(m) for m in model.modules() if m is not block)


def test_a_compiled_block() -> None:
    model = build("llama4")
    expected = model(tokens()).logits.detach()
    moec.transformers.enable(model)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens()).logits, expected, rtol=1e-3, atol=1e-3)
