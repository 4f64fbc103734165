# SPDX-License-Identifier: Apache-2.0
"""Main gradients: what backward adds to them, where they are, and what it leaves alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch_cases import inputs, make_experts

import moec.torch
from moec.golden import row_error


def backward(experts: moec.torch.Experts, seed: int = 0) -> None:
    x, ids, weights, d_y = inputs(seed, experts.down.dtype)
    experts(x, ids, weights).backward(d_y)


def test_they_accumulate() -> None:
    plain, main = make_experts(dtype=torch.bfloat16), make_experts(dtype=torch.bfloat16)
    main.use_main_grads()
    total = torch.zeros_like(plain.down, dtype=torch.float32)
    for seed in range(3):
        x, ids, weights, d_y = inputs(seed, torch.bfloat16)
        plain.zero_grad()
        plain(x, ids, weights).backward(d_y)
        total += plain.down.grad.float()
        d_x, x.grad = x.grad, None
        main(x, ids, weights).backward(d_y)
        assert torch.equal(d_x, x.grad)
    assert main.down.grad is None and main.gate_up.grad is None
    assert row_error(main.down.main_grad.numpy(), total.numpy()) < 8e-3


def test_of_a_strided_parameter() -> None:
    """A main gradient is contiguous, whatever the parameter's strides are."""
    plain, main = make_experts(), make_experts()
    held = main.down.detach()
    main.down = torch.nn.Parameter(held.transpose(1, 2).contiguous().transpose(1, 2))
    main.use_main_grads()
    backward(plain)
    backward(main)
    assert main.down.main_grad.is_contiguous() and not main.down.is_contiguous()
    assert torch.equal(main.down.main_grad, plain.down.grad)


@pytest.mark.parametrize("wrong", ["strides", "shape", "dtype", "count"])
def test_refusals(wrong: str) -> None:
    experts = make_experts().use_main_grads()
    right = experts.down.main_grad
    text, kind = {
        "strides": (r"down .* strides \[768, 1, 32\]; contiguous \[8, 32, 24\]", ValueError),
        "shape": (r"down has the shape \[8, 24, 32\]", ValueError),
        "dtype": ("d_down is of torch.float64", TypeError),
        "count": ("1 main gradients for gate_up, down", ValueError),
    }[wrong]
    if wrong == "strides":
        experts.down.main_grad = right.transpose(1, 2).contiguous().transpose(1, 2)
    elif wrong == "shape":
        experts.down.main_grad = right.transpose(1, 2).contiguous()
    elif wrong == "dtype":
        experts.down.main_grad = right.double()
    else:
        experts._main_grads = lambda: [right]
    with pytest.raises(kind, match=text):
        backward(experts)


@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_is_added_where_no_gradient_is_needed(compiled: bool) -> None:
    experts, both = make_experts().use_main_grads(), make_experts().use_main_grads()
    experts.down.requires_grad_(False)
    x, ids, weights, d_y = inputs()
    run = experts
    if compiled:
        run = torch.compile(experts, fullgraph=True, backend="aot_eager")
    run(x, ids, weights).backward(d_y)
    backward(both)
    assert not experts.down.main_grad.any()
    assert torch.equal(experts.gate_up.main_grad, both.gate_up.main_grad)
    experts.down.requires_grad_(True)
    backward(experts)
    assert torch.equal(experts.down.main_grad, both.down.main_grad)


def test_nothing_is_added_to_frozen_ones() -> None:
    experts = make_experts().use_main_grads().freeze()
    backward(experts)
    assert not experts.down.main_grad.any() and not experts.gate_up.main_grad.any()
    backward(experts.unfreeze())
    assert experts.down.main_grad.any() and experts.gate_up.main_grad.any()


def test_no_time_is_spent_where_no_gradient_is_needed() -> None:
    """The library's own count of operations: a third of backward's is each matrix' gradient."""
    counts = []
    for frozen in ((), ("down",), ("down", "gate_up")):
        experts = make_experts().use_main_grads()
        for name in frozen:
            getattr(experts, name).requires_grad_(False)
        x, ids, weights, d_y = inputs()
        y = experts(x, ids, weights)
        context = moec.torch._engine.context_of(x.device)
        before = context.stats().flops
        y.backward(d_y)
        counts.append(context.stats().flops - before)
    assert counts[0] > counts[1] > counts[2] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_makes_its_own(dtype: torch.dtype) -> None:
    experts = make_experts(dtype=torch.bfloat16).use_main_grads(dtype)
    backward(experts)
    copied = copy.deepcopy(experts)
    with torch.no_grad():
        x, ids, weights, _ = inputs(0, torch.bfloat16)
        copied(x, ids, weights)  # an average for evaluation needs none
    assert copied.down.main_grad is None
    backward(copied)
    copied.down.main_grad = None  # as zero_grad() does with .grad
    copied.gate_up.main_grad.zero_()
    backward(copied)
    assert copied.down.main_grad.dtype == dtype
    assert torch.equal(copied.down.main_grad, experts.down.main_grad)
    backward(copied, 1)
    assert not torch.equal(copied.down.main_grad, experts.down.main_grad)


def test_a_functional_call_leaves_a_copy_as_it_is() -> None:
    """Nobody would see main gradients of the tensors that it puts in the parameters' place."""
    experts = make_experts().use_main_grads()
    copied = copy.deepcopy(experts)
    x, ids, weights, _ = inputs()
    others = {n: p.detach().clone().requires_grad_() for n, p in copied.named_parameters()}
    for module in (experts, copied):
        with pytest.raises(RuntimeError, match="is not the parameter that use_main_grads"):
            torch.func.functional_call(module, others, (x, ids, weights))
        backward(module)
    assert copied.down.main_grad.any()
    assert torch.equal(copied.down.main_grad, experts.down.main_grad)


def test_another_parameter_has_none() -> None:
    """FSDP2 puts others in the place of those that have main gradients: nobody would see them."""
    experts = make_experts().use_main_grads()
    experts.down = torch.nn.Parameter(experts.down.detach().clone())
    with pytest.raises(RuntimeError, match="down is not the parameter that use_main_grads"):
        backward(experts)
    backward(experts.use_main_grads())
    assert experts.down.main_grad.any()


def test_a_copy_of_a_partly_frozen_module() -> None:
    experts = make_experts().use_main_grads()
    experts.down.requires_grad_(False)
    copied = copy.deepcopy(experts)
    backward(copied)
    assert copied.gate_up.main_grad.any()
    copied.down.requires_grad_(True)
    backward(copied)
    assert copied.down.main_grad.any()
