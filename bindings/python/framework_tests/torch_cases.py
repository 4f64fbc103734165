# SPDX-License-Identifier: Apache-2.0
"""Small experts and layers for the torch tests, and the same in plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from conftest import compare_gradients, dot_error, golden_layer, layouts, stacked
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import moec
import moec.torch
from moec.golden import row_error

T, H, I, E, K = 13, 32, 24, 8, 2


def reference(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Gated experts by a loop, differentiable."""
    y = torch.zeros_like(x)
    for e in range(len(down)):
        token, slot = torch.where(ids == e)
        gate, up = (x[token] @ gate_up[e].T).chunk(2, -1)
        rows = (torch.nn.functional.silu(gate) * up) @ down[e].T
        y = y.index_add(0, token, rows * weights[token, slot, None])
    return y


def make_experts(device: str = "cpu", **options: object) -> moec.torch.Experts:
    torch.manual_seed(1)
    dtype = options.pop("dtype", torch.float32)
    desc = moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=K)
    return moec.torch.Experts(desc, **options).to(device, dtype)


def make_layer(device: str = "cpu", **options: object) -> moec.torch.MoELayer:
    torch.manual_seed(1)
    desc = moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=K)
    router = moec.RouterDesc(num_experts=E, top_k=K, norm=moec.Norm.SUM)
    return moec.torch.MoELayer(router, desc, **options).to(device)


def inputs(
    seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, expert ids, routing weights, d_y."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, H, generator=generator).to(device, dtype).requires_grad_()
    weights, ids = torch.randn(T, E, generator=generator).softmax(-1).topk(K)
    d_y = torch.randn(T, H, generator=generator).to(device, dtype)
    return x, ids.to(device), weights.to(device).requires_grad_(), d_y


def step(kind: str, main_grads: bool = False, device: str = "cpu") -> list[Tensor]:
    """y, the other outputs and all gradients of one step."""
    x, ids, weights, d_y = inputs(device=device)
    module = make_experts(device) if kind == "experts" else make_layer(device)
    if main_grads:
        module.use_main_grads()
    others: Any = ()
    if kind == "experts":
        y = module(x, ids, weights)
    else:
        y, others = module.route(x)
    y.backward(d_y)
    found = [y, *others, x.grad, weights.grad]
    for parameter in module.parameters():
        found += [parameter.grad, getattr(parameter, "main_grad", None)]
    return [t.detach() for t in found if t is not None]


class Watch(TorchDispatchMode):
    """The names of moec's operators that a mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "moec":
            self.seen.append(function._schema.name.removeprefix("moec::"))
        return function(*args, **(kwargs or {}))


def compare(
    experts: moec.torch.Experts, x: Tensor, ids: Tensor, weights: Tensor, d_y: Tensor, limit: float
) -> None:
    """y and every gradient beside the reference's in fp32, per row."""
    leaves = (x, weights, experts.gate_up, experts.down)
    y = experts(x, ids, weights)
    got = [y, *torch.autograd.grad(y, leaves, d_y)]
    wide = [t.detach().float().requires_grad_() for t in leaves]
    ref = reference(wide[0], ids, *wide[1:])
    want = [ref, *torch.autograd.grad(ref, wide, d_y.float())]
    for name, a, b in zip(("y", "x", "weights", "gate_up", "down"), got, want, strict=True):
        measure = dot_error if name == "weights" and x.dtype != torch.float32 else row_error
        error = measure(a.detach().float().cpu().numpy(), b.detach().cpu().numpy())
        assert error <= limit, f"{name}: {error:.2e}"


def run_golden(family: str, device: str = "cpu") -> None:
    """A golden family through MoELayer in fp32: y and every gradient."""
    checkpoint, spec = golden_layer(family)
    arrays = stacked(spec.matrices) | spec.inputs
    if spec.shared is not None:
        arrays |= {f"shared_expert_{n}": a for n, a in stacked(spec.shared).items()}
    layer = moec.torch.MoELayer(
        spec.router, spec.experts, bias="down_bias" in arrays, device=device,
        output_bias="output_bias" in arrays, **layouts(spec),
    )
    own = {*dict(layer.named_parameters()), "select_bias"}
    data = {n: torch.tensor(a, device=device) for n, a in arrays.items() if n not in own}
    with torch.no_grad():
        for name, parameter in [*layer.named_parameters(), *layer.named_buffers()]:
            parameter.copy_(torch.tensor(np.array(arrays[name])).reshape(parameter.shape))
    x = torch.tensor(checkpoint["x"], device=device).requires_grad_()
    y = layer(x, **data)
    assert row_error(y.detach().cpu().numpy(), checkpoint["y"]) <= 2e-5
    y.backward(torch.tensor(checkpoint["dout"], device=device).reshape(y.shape))
    got = {n: p.grad.cpu().numpy() for n, p in layer.named_parameters() if p.grad is not None}
    assert x.grad is not None
    compare_gradients(spec, checkpoint, got | {"x": x.grad.cpu().numpy()})
