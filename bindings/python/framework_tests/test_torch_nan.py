# SPDX-License-Identifier: Apache-2.0
"""NaN is never silent, and a masked token's is never seen.

Seen to fail: a router that passes NaN over (y of zeros, finite gradients), and gradients of the
gate that read the x of masked tokens.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch_cases import E, H, I, K

import moec
import moec.torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SCORES = [moec.Score.SOFTMAX, moec.Score.SIGMOID]


def layer(score: moec.Score, device: str) -> moec.torch.MoELayer:
    torch.manual_seed(1)
    desc = moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=K)
    router = moec.RouterDesc(num_experts=E, top_k=K, norm=moec.Norm.SUM, score=score)
    return moec.torch.MoELayer(router, desc).to(device)


def step(made: moec.torch.MoELayer, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """y, expert ids and all gradients of one step."""
    x = x.detach().requires_grad_()
    made.zero_grad()
    y, routing = made.route(x, token_mask=mask)
    y.square().sum().backward()
    grads = {name: p.grad.clone() for name, p in made.named_parameters()}
    return grads | {"x": x.grad, "y": y.detach(), "ids": routing.expert_ids}


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_nan_in_the_routers_weights_shows_everywhere(score: moec.Score, device: str) -> None:
    made, x = layer(score, device), torch.randn(64, H, device=device)
    with torch.no_grad():
        made.gate_weight[3, 5] = float("nan")
    got = step(made, x)
    ids = got.pop("ids")
    assert bool((ids >= 0).all()) and bool((ids < E).all())
    for name, values in got.items():
        assert bool(values.isnan().any()), name
    assert bool(got["y"].isnan().all()) and bool(got["gate_weight"].isnan().any(1).sum() > 1)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("planted", [float("nan"), float("inf"), float("-inf")])
def test_masked_tokens_leave_no_trace(score: moec.Score, device: str, planted: float) -> None:
    """The bits of zeros there."""
    made, x = layer(score, device), torch.randn(70, H, device=device)
    mask = torch.ones(70, dtype=torch.bool, device=device)
    mask[::3] = False
    x[~mask] = 0
    zeros = step(made, x, mask)
    x[~mask] = planted
    got = step(made, x, mask)
    for name, values in got.items():
        assert torch.equal(values, zeros[name]), name
