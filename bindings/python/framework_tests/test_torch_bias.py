# SPDX-License-Identifier: Apache-2.0
"""What MoELayer shows of its router: descriptor, counts, and the bias that balances it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch_cases import E, H, I, K

import moec
import moec.torch

ROUTER = moec.RouterDesc(num_experts=E, top_k=K, norm=moec.Norm.SUM, score=moec.Score.SIGMOID,
                         flags=moec.RouterFlags.SELECT_BIAS)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def layer(device: str = "cpu", router: moec.RouterDesc = ROUTER) -> moec.torch.MoELayer:
    torch.manual_seed(1)
    desc = moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=K)
    return moec.torch.MoELayer(router, desc).to(device)


def test_the_router_of_a_layer() -> None:
    made = layer()
    assert made.router is ROUTER and copy.deepcopy(made).router == ROUTER


def test_counts_are_the_librarys() -> None:
    """Masked tokens count for no expert."""
    made, x = layer(), torch.randn(50, H)
    mask = torch.rand(50) < 0.7
    with torch.no_grad():
        _, routing = made.route(x, token_mask=mask)
    context = moec.Context(num_threads=1)
    ref = np.zeros(E, np.int32)
    moec.Layer(context, ROUTER, made.desc).forward(
        x, moec.Weights.of(context, gate_up=made.gate_up, down=made.down), made.gate_weight,
        select_bias=made.select_bias, token_mask=mask, counts=ref)
    got = routing.counts()
    assert got.dtype == torch.int32 and got.tolist() == ref.tolist()
    assert ref.sum() == K * int(mask.sum()) > 0


@pytest.mark.parametrize("device", DEVICES)
def test_the_bias_update(device: str) -> None:
    """Steps of the rate towards the mean, which balance a router that favours some experts."""
    made, x = layer(device), (torch.randn(400, H) + 0.5).to(device)
    with torch.no_grad():
        made.gate_weight[:2] += 0.1
    first = made.route(x)[1].counts()
    version = made.select_bias._version
    made.update_bias(first, rate=0.01)
    wanted = 0.01 * torch.sign(first.float().mean() - first)
    assert torch.equal(made.select_bias, wanted) and made.select_bias._version > version
    assert len(set(wanted.tolist())) > 1
    for _ in range(60):
        made.update_bias(made.route(x)[1].counts(), rate=0.01)
    last = made.route(x)[1].counts()
    assert last.max() < 0.6 * first.max() and last.sum() == first.sum()


def test_counts_in_a_graph() -> None:
    made, x = layer(), torch.randn(30, H)
    compiled = torch.compile(lambda t: made.route(t)[1].counts(), fullgraph=True,
                             backend="aot_eager")
    assert torch.equal(compiled(x), made.route(x)[1].counts())


def test_refusals() -> None:
    plain = layer(router=moec.RouterDesc(num_experts=E, top_k=K))
    with pytest.raises(ValueError, match="no select_bias; RouterFlags.SELECT_BIAS"):
        plain.update_bias(torch.zeros(E, dtype=torch.int32), rate=0.1)
    with pytest.raises(TypeError, match="counts is a list"):
        layer().update_bias([0] * E, rate=0.1)
    with pytest.raises(moec.DTypeError, match="counts has dtype"):
        layer().update_bias(torch.zeros(E), rate=0.1)
