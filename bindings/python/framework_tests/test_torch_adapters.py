# SPDX-License-Identifier: Apache-2.0
"""The operators with a list of factors: what torch checks of operators, one graph with the bits of
an eager call, and the merged experts' numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import DEVICES
from torch import Tensor

import moec
import moec.torch
from moec.torch import _adapted, _ops

E, H, I, T, K, R = 4, 16, 12, 6, 2, 3
TEXT = _adapted.text_of(moec.GateLayout.GATE_THEN_UP, [
    _adapted.Term(0, "gate_up", 0.5), _adapted.Term(0, "down", 2.0)])


def peft_b(stored: Tensor) -> Tensor:
    return stored.reshape(stored.shape[0], R, E).permute(2, 0, 1)


class Adapted:
    """Experts with one adapter in PEFT's storage; A of down is one for all experts."""

    def __init__(self, device: str = "cpu") -> None:
        torch.manual_seed(5)
        self.experts = moec.torch.Experts(
            moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=K)
        ).to(device)
        self.ids = torch.randint(0, E, (T, K)).to(device)
        shapes = ((T, H), (T, K), (E, R, H), (2 * I, R * E), (1, R, I), (H, R * E))
        self.leaves = [torch.randn(shape).to(device).requires_grad_() for shape in shapes]

    def tensors(self, x: Tensor, weights: Tensor) -> dict[str, Any]:
        own = dict(self.experts.named_parameters())
        return own | {"x": x, "expert_ids": self.ids, "routing_weights": weights}

    def __call__(self, x: Tensor, weights: Tensor, *factors: Tensor) -> Tensor:
        a, b, a_down, b_down = factors
        return _ops.call(_ops.EXPERTS, self.tensors(x, weights), self.experts._text,
                         moec.Save.PREACT, factors=[a, peft_b(b), a_down, peft_b(b_down)],
                         adapters=TEXT)[0]


def test_one_graph() -> None:
    call = Adapted()
    y = call(*call.leaves)
    compiled = torch.compile(call.__call__, fullgraph=True, backend="aot_eager")(*call.leaves)
    assert torch.equal(y, compiled)
    want = torch.autograd.grad(y.square().sum(), call.leaves)
    got = torch.autograd.grad(compiled.square().sum(), call.leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_operators_are_what_torch_expects() -> None:
    call = Adapted()
    kind = _ops._ADAPTED[_ops.EXPERTS]
    x, weights, a, b, a_down, b_down = call.leaves
    factors = [a, peft_b(b.detach()), a_down, peft_b(b_down.detach())]
    factors = [t.detach().requires_grad_() for t in factors]
    given = call.tensors(x, weights)
    values = [given.get(name) for name in kind.inputs]
    settings = (call.experts._text, int(moec.Save.PREACT), 0, 0, TEXT)
    torch.library.opcheck(kind.forward, (*values, factors, [], *settings))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_merged_experts(dtype: torch.dtype, device: str) -> None:
    """Factors in another type than x, which is rounded once."""
    call = Adapted(device)
    x, weights, *factors = call.leaves
    x = x.detach().to(dtype).requires_grad_()
    call.experts.to(dtype)
    y = call(x, weights, *factors)
    got = torch.autograd.grad(y.float().sum(), [x, weights, *factors])
    a, b, a_down, b_down = factors
    deltas = {"gate_up": 0.5 * peft_b(b) @ a, "down": 2.0 * peft_b(b_down) @ a_down}
    merged = {n: p.float() + deltas[n] for n, p in call.experts.named_parameters()}
    x32 = x.detach().float().requires_grad_()
    given = call.tensors(x32, weights) | merged
    want_y = _ops.call(_ops.EXPERTS, given, call.experts._text, moec.Save.PREACT)[0]
    want = torch.autograd.grad(want_y.sum(), [x32, weights, *factors])
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip((y, *got), (want_y, *want), strict=True):
        assert (one.float() - other).norm() <= limit * other.norm()
