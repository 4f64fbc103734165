# SPDX-License-Identifier: Apache-2.0
"""What changes between two calls of experts with PEFT's adapters is seen by the next one: it gives
the bits of a copy of the module, which nobody has called. Shown once to fail: adapters of a module
that are bound once, and codes whose addresses nobody looks at."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import HERE
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import moec.transformers  # noqa: F401
from moec.torch import PackedTensor

EXPERTS, HIDDEN, TOKENS = 4, 64, 5
NAMES = ("gate_up_proj", "down_proj")


def packed(values: torch.Tensor) -> PackedTensor:
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(values, blocksize=64, quant_type="nf4",
                                            compress_statistics=True)
    return PackedTensor.from_bnb(codes, state)


def config(**more: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules=[], **more,
                      target_parameters=[f"experts.{name}" for name in NAMES])


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def adapted(is_packed: bool) -> nn.Module:
    """A module whose `experts` have the adapter "default", of which no factor is 0."""
    sizes = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=HIDDEN, num_experts=EXPERTS,
                           num_experts_per_tok=2)
    sizes._experts_implementation_internal = "moec"
    outer = nn.Module()
    experts = outer.experts = Qwen3MoeExperts(sizes).bfloat16().requires_grad_(False)
    for seed, name in enumerate(NAMES):
        held = getattr(experts, name)
        held.data = drawn(*held.shape, seed=seed).mul(0.1).bfloat16()
        if is_packed:
            experts._parameters[name] = nn.Parameter(packed(held.data), requires_grad=False)
    made = inject_adapter_in_model(config(), outer).to(HERE)
    draw_b(made)
    return made


def draw_b(model: nn.Module) -> None:
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_B" in name:
            parameter.data = drawn(*parameter.shape, seed=10 + seed).mul(0.2).to(parameter)


def numbers(model: Any, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """y, and the gradients of x, of the routing weights and of what is trained."""
    x = drawn(TOKENS, HIDDEN, seed=5).to(HERE, dtype).requires_grad_()
    ids = torch.arange(2 * TOKENS, device=HERE).reshape(TOKENS, 2) % EXPERTS
    weights = torch.linspace(0.1, 0.9, 2 * TOKENS, device=HERE).reshape(TOKENS, 2)
    weights.requires_grad_()
    y = model.experts(x, ids, weights)
    trained = [p for p in model.parameters() if p.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, weights, *trained])]


def assert_equal(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


# ---- what changes; the outermost wrapper is model.experts
def wrappers(model: Any) -> list[Any]:
    return [model.experts, model.experts.base_layer]


def module(model: Any) -> Any:
    return model.experts.base_layer.base_layer


def swap_a(model: Any) -> None:
    weight = wrappers(model)[0].lora_A["default"].weight
    weight.data = 2 * weight.data


def replace_b(model: Any) -> None:
    linear = wrappers(model)[1].lora_B["default"]
    linear.weight = nn.Parameter(2 * linear.weight.detach())


def write_b(model: Any) -> None:
    with torch.no_grad():
        wrappers(model)[0].lora_B["default"].weight.mul_(-1)


def turn_storage(model: Any) -> None:
    weight = wrappers(model)[0].lora_B["default"].weight
    weight.data = weight.data.flip(0).t().contiguous().t()


def convert_factors(model: Any) -> None:
    for wrapper in wrappers(model):
        wrapper.lora_A.bfloat16()
        wrapper.lora_B.bfloat16()


def scale(model: Any) -> None:
    wrappers(model)[1].scaling["default"] *= 3


def add(model: Any) -> None:
    inject_adapter_in_model(config(), model, adapter_name="second")
    draw_b(model)
    for wrapper in wrappers(model):
        wrapper.set_adapter(["default", "second"])


def switch(model: Any) -> None:
    add(model)
    for wrapper in wrappers(model):
        wrapper.set_adapter("second")


def delete(model: Any) -> None:
    switch(model)
    numbers(model)
    for wrapper in wrappers(model):
        wrapper.delete_adapter("default")


def switch_off(model: Any) -> None:
    wrappers(model)[0].enable_adapters(False)


def replace_stack(model: Any) -> None:
    held = module(model)._parameters["down_proj"]
    plain = held.dequantise() if isinstance(held, PackedTensor) else held.data
    other: Any = 2 * plain
    other = packed(other) if isinstance(held, PackedTensor) else other
    module(model)._parameters["down_proj"] = nn.Parameter(other, requires_grad=False)


def swap_stack(model: Any) -> None:
    held = module(model)._parameters["gate_up_proj"]
    if isinstance(held, PackedTensor):
        held.data = packed(-held.dequantise())
    else:
        held.data = -held.data


def write_stack(model: Any) -> None:
    held = module(model)._parameters["down_proj"]
    if isinstance(held, PackedTensor):
        held.parts[""].copy_(held.parts[""].flip(0))
    else:
        held.mul_(-1)


CHANGES = [swap_a, replace_b, write_b, turn_storage, convert_factors, scale, add, switch, delete,
           switch_off, replace_stack, swap_stack, write_stack]


@pytest.mark.parametrize("is_packed", [True, False], ids=["nf4", "plain"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_is_seen(change: Callable[[Any], None], is_packed: bool) -> None:
    model = adapted(is_packed)
    before = numbers(model)
    assert_equal(numbers(model), before)
    change(model)
    got = numbers(model)
    if change is not convert_factors:  # the products read them in 16 bits anyway
        assert not torch.equal(got[0], before[0])
    assert_equal(got, numbers(copy.deepcopy(model)))


@pytest.mark.parametrize("is_packed", [True, False], ids=["nf4", "plain"])
def test_another_name(is_packed: bool) -> None:
    model = adapted(is_packed)
    before = numbers(model)
    for wrapper in wrappers(model):
        for held in (wrapper.lora_A, wrapper.lora_B, wrapper.scaling, wrapper.r,
                     wrapper.lora_alpha):
            held["other"] = held.pop("default")
        wrapper.set_adapter("other")
    assert_equal(numbers(model), before)


def test_a_plain_base_of_another_type() -> None:
    model = adapted(False)
    numbers(model)
    module(model).float()
    got = numbers(model, torch.float32)
    assert got[0].dtype == torch.float32
    assert_equal(got, numbers(copy.deepcopy(model), torch.float32))


@pytest.mark.parametrize("is_packed", [True, False], ids=["nf4", "plain"])
def test_inference_mode_between_two_steps(is_packed: bool) -> None:
    model = adapted(is_packed)
    before = numbers(model)
    with torch.inference_mode():
        x = drawn(TOKENS, HIDDEN, seed=5).to(HERE, torch.bfloat16)
        ids = torch.arange(2 * TOKENS, device=HERE).reshape(TOKENS, 2) % EXPERTS
        weights = torch.linspace(0.1, 0.9, 2 * TOKENS, device=HERE).reshape(TOKENS, 2)
        assert torch.equal(model.experts(x, ids, weights), before[0])
    assert_equal(numbers(model), before)


@pytest.mark.parametrize("is_packed", [True, False], ids=["nf4", "plain"])
def test_autocast_between_two_steps(is_packed: bool) -> None:
    model = adapted(is_packed)
    before = numbers(model)
    with torch.autocast(HERE, torch.float16):
        got = numbers(model, torch.float32)
        assert_equal(got, numbers(copy.deepcopy(model), torch.float32))
    assert_equal(numbers(model), before)


def test_threads_share_no_arguments() -> None:
    models = [adapted(True), adapted(False)]
    write_b(models[1])
    want = [numbers(copy.deepcopy(model)) for model in models]
    wrong: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for _ in range(5):
                for model, numbers_of in zip(models[index:] + models[:index],
                                             want[index:] + want[:index], strict=True):
                    assert_equal(numbers(model), numbers_of)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


def test_rows_that_are_no_multiple_of_the_experts() -> None:
    model = adapted(False)
    weight = wrappers(model)[0].lora_A["default"].weight
    weight.data = weight.data[:-1]
    with pytest.raises(ValueError, match=r"lora_A has the shape \[15, 64\].*of 4 experts"):
        numbers(model)
