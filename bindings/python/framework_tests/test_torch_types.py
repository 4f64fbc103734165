# SPDX-License-Identifier: Apache-2.0
"""Element types in moec.torch: autocast, conversions, and what stays in fp32."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch_cases import E, H, I, K, inputs, make_experts

import moec
import moec.torch
from moec.golden import row_error


def make_layer(flags: moec.RouterFlags, **options: object) -> moec.torch.MoELayer:
    torch.manual_seed(1)
    router = moec.RouterDesc(num_experts=E, top_k=K, flags=flags)
    desc = moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=K)
    return moec.torch.MoELayer(router, desc, **options)


def test_autocast() -> None:
    """bf16 matrices, fp32 routing weights, gradients in the parameters' type."""
    experts = make_experts()
    x, ids, weights, d_y = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, ids, weights)
    y.backward(d_y.bfloat16())
    low = make_experts(dtype=torch.bfloat16)
    expected = low(x.bfloat16(), ids, weights)
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    assert experts.down.grad is not None and experts.down.grad.dtype == torch.float32
    assert weights.grad is not None and weights.grad.dtype == torch.float32


def test_autocast_of_the_operator() -> None:
    """A direct call of the operator under autocast, without the module's own casts."""
    experts = make_experts()
    x, ids, weights, _ = inputs()
    tensors = {"x": x, "expert_ids": ids, "routing_weights": weights,
               **dict(experts.named_parameters())}
    kind = moec.torch._ops.EXPERTS
    values = [tensors.get(n) for n in kind.inputs]
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.ops.moec.experts(*values, [], experts._text, 0, 0, 0)[0]
    assert y.dtype == torch.bfloat16
    error = row_error(y.detach().float().numpy(), experts(x, ids, weights).detach().numpy())
    assert error < 3e-2


def test_autocast_of_the_operator_adds_to_main_gradients() -> None:
    experts = make_experts().use_main_grads()
    x, ids, weights, d_y = inputs()
    experts(x, ids, weights).backward(d_y)
    expected = experts.down.main_grad.clone()
    experts.down.main_grad.zero_()
    tensors = {"x": x, "expert_ids": ids, "routing_weights": weights,
               **dict(experts.named_parameters())}
    kind = moec.torch._ops.EXPERTS
    values = [tensors.get(n) for n in kind.inputs]
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.ops.moec.experts(*values, experts._main_grads(), experts._text,
                                   moec.Save.ALL, 0, 0)[0]
    y.backward(d_y.to(y.dtype))
    error = row_error(experts.down.main_grad.flatten(0, 1).numpy(),
                      expected.flatten(0, 1).numpy())
    assert error < 5e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_of_a_low_layer_with_a_logit_bias(dtype: torch.dtype) -> None:
    """What decides about routing goes to fp32 from any type."""
    layer = make_layer(moec.RouterFlags.LOGIT_BIAS).bfloat16()
    with torch.no_grad():
        layer.gate_bias.uniform_(-1, 1)
    x, *_ = inputs(0, torch.bfloat16)
    with torch.autocast("cpu", dtype):
        y = layer(x)
    y.sum().backward()
    expected = copy.deepcopy(layer).float()(x.detach().float())
    assert y.dtype == dtype and layer.gate_bias.grad.dtype == torch.bfloat16
    assert row_error(y.detach().float().numpy(), expected.detach().numpy()) < 3e-2


def test_frozen_weights_under_autocast() -> None:
    """Those in fp32 are read by it; those of 16 bits are of one type."""
    experts = make_experts()
    x, ids, weights, _ = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        expected = experts(x, ids, weights)
        assert torch.equal(experts.freeze()(x, ids, weights), expected)
    low = make_experts(dtype=torch.bfloat16).freeze()
    with (torch.autocast("cpu", torch.float16),
          pytest.raises(RuntimeError, match="frozen in torch.bfloat16 and is torch.float16")):
        low(x, ids, weights)


def test_select_bias_stays_in_fp32() -> None:
    """Its steps are finer than bf16: neither converting nor a default type rounds it."""
    layer = make_layer(moec.RouterFlags.SELECT_BIAS)
    values = torch.linspace(8.0, 8.01, E)
    layer.select_bias.copy_(values)
    block = torch.nn.Sequential(layer)
    for convert in (block.bfloat16, block.half, block.double, lambda: block.to(torch.bfloat16)):
        convert()
        assert layer.select_bias.dtype == torch.float32 and layer.down.dtype != torch.float32
        assert torch.equal(layer.select_bias, values)
    assert torch.equal(layer.state_dict()["select_bias"], values)
    assert block.to("meta", torch.float16)[0].select_bias.is_meta
    assert layer.select_bias.dtype == torch.float32
    assert not block.to_empty(device="cpu")[0].select_bias.is_meta
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = make_layer(moec.RouterFlags.SELECT_BIAS)
    finally:
        torch.set_default_dtype(torch.float32)
    assert made.select_bias.dtype == torch.float32


def test_reset_makes_select_bias() -> None:
    with torch.device("meta"):
        layer = make_layer(moec.RouterFlags.SELECT_BIAS)
    layer.to_empty(device="cpu")
    layer.select_bias.fill_(7)
    layer.reset_parameters()
    assert not layer.select_bias.any()


@pytest.mark.parametrize("scalar", [np.float32, np.float16, np.float64, torch.tensor])
def test_scalars_of_other_kinds(scalar: Any) -> None:
    """They are not cut down to integers on their way through the operators' text."""
    x, *_ = inputs()
    activation = moec.Activation(kind=moec.ActivationKind.GPTOSS, alpha=scalar(1.5),
                                 limit=scalar(0.25))
    desc = moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=K, activation=activation)
    router = moec.RouterDesc(num_experts=np.int64(E), top_k=K, scale=scalar(2.5))
    plain = moec.RouterDesc(num_experts=E, top_k=K, scale=2.5)
    layer = moec.torch.MoELayer(router, desc)
    same = moec.torch.MoELayer(plain, replace(desc, activation=replace(
        activation, alpha=1.5, limit=0.25)))
    same.load_state_dict(layer.state_dict())
    assert layer._text == same._text and '"scale":2.5' in layer._text
    assert '"alpha":1.5,"limit":0.25' in layer._text
    assert torch.equal(layer(x), same(x))


def test_what_torch_only_noted_in_a_tensor() -> None:
    """A gradient of zeros without memory, as of sgn; a negation that is still to be done."""
    layer = make_layer(moec.RouterFlags.NONE)
    x = inputs()[0].detach().requires_grad_()
    torch.sgn(layer(x)).sum().backward()
    assert x.grad is not None and not x.grad.any()
    with torch.no_grad():
        assert torch.equal(layer(torch._neg_view(x)), layer(-x))
    d_y = torch.randn(x.shape)
    ways = [torch.autograd.grad(layer(x), x, d)[0] for d in (-d_y, torch._neg_view(d_y))]
    assert torch.equal(*ways)
