# SPDX-License-Identifier: Apache-2.0
"""Jitter of the router's input in moec.torch: noise of each training call, none in evaluation."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint as recompute
from torch_cases import E, H, I, K, T, inputs

import moec
import moec.torch

FLAGS = pytest.mark.parametrize("flags", [moec.RouterFlags.NONE, moec.RouterFlags.JITTER_X])


def make_layer(jitter: float, flags: moec.RouterFlags) -> moec.torch.MoELayer:
    torch.manual_seed(1)
    router = moec.RouterDesc(
        num_experts=E, top_k=K, norm=moec.Norm.SUM, jitter=jitter, flags=flags)
    desc = moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=K)
    return moec.torch.MoELayer(router, desc)


def results(layer: moec.torch.MoELayer, seed: int, run: object = None) -> list[torch.Tensor]:
    """y and every gradient with the noise of a seed."""
    x, *_, d_y = inputs()
    torch.manual_seed(seed)
    y = (layer if run is None else run)(x)  # type: ignore[operator]
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], d_y)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(i, j) for i, j in zip(a, b, strict=True))


@FLAGS
def test_noise_is_new_in_each_call_and_repeats_by_seed(flags: moec.RouterFlags) -> None:
    layer = make_layer(0.3, flags)
    x, *_ = inputs()
    torch.manual_seed(3)
    first, second = (layer.route(x)[1].logits for _ in range(2))
    torch.manual_seed(3)
    again = layer.route(x)[1].logits
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert same(results(layer, 3), results(layer, 3))


@FLAGS
def test_evaluation_is_without(flags: moec.RouterFlags) -> None:
    layer, quiet = make_layer(0.3, flags).eval(), make_layer(0, moec.RouterFlags.NONE)
    state = torch.get_rng_state()
    assert same(results(layer, 3), results(quiet, 4))
    assert not same(results(layer.train(), 3), results(quiet, 4))
    torch.set_rng_state(state)
    quiet(inputs()[0])  # draws nothing
    assert torch.equal(torch.get_rng_state(), state)


@FLAGS
def test_backward_has_the_noise_of_its_forward(flags: moec.RouterFlags) -> None:
    """The gradient of a logit is the jittered x: two calls, then two backwards."""
    layer = make_layer(0.3, flags)
    x, *_ = inputs()
    torch.manual_seed(3)
    logits = [layer.route(x)[1].logits for _ in range(2)]
    d_logits = torch.zeros(T, E)
    d_logits[:, 0] = 1
    for z in logits:
        (gradient,) = torch.autograd.grad(z, layer.gate_weight, d_logits)
        noisy = gradient[0]  # sum_t x[t] * noise[t]
        torch.testing.assert_close(noisy @ layer.gate_weight[0], z[:, 0].sum())
        assert not torch.allclose(noisy, x.sum(0), rtol=1e-3)


@FLAGS
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, flags: moec.RouterFlags) -> None:
    layer = make_layer(0.3, flags)
    x, *_, d_y = inputs()
    found = []
    for again in (False, True):
        torch.manual_seed(3)
        for leaf in (x, *layer.parameters()):
            leaf.grad = None
        y = recompute(layer, x, use_reentrant=reentrant) if again else layer(x)
        layer(x)  # moves the generator on before backward
        y.backward(d_y)
        found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    assert same(*found)


def test_compiled() -> None:
    """A graph break at the offset, and one compilation for all offsets but the first."""
    layer = make_layer(0.3, moec.RouterFlags.NONE)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter)
    for seed in range(8):
        assert same(results(layer, seed, compiled), results(layer, seed)), seed
    assert counter.frame_count <= 4
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        traced = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert all(same(results(layer, s, traced), results(layer, s)) for s in range(3))
    whole = torch.compile(layer.eval(), fullgraph=True, backend="aot_eager")
    assert same(results(layer, 0, whole), results(layer, 1))
