# SPDX-License-Identifier: Apache-2.0
"""moec.torch in eager mode: golden families, autograd's corners, memory, trainable weights."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from conftest import FAMILIES
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint as recompute
from torch_cases import (
    E,
    H,
    I,
    K,
    T,
    compare,
    inputs,
    make_experts,
    make_layer,
    reference,
    run_golden,
)

import moec
import moec.torch
from moec.golden import row_error


@pytest.mark.parametrize("family", FAMILIES)
def test_golden(family: str) -> None:
    run_golden(family)


def test_experts_against_autograd() -> None:
    experts = make_experts()
    x, ids, weights, d_y = inputs()
    compare(experts, x, ids, weights, d_y, 2e-5)


def test_a_gate_up_swap_is_seen() -> None:
    """The comparison can fail: gate and up of one expert exchanged in the reference alone."""
    experts = make_experts()
    x, ids, weights, _ = inputs()
    y = experts(x, ids, weights)
    swapped = experts.gate_up.detach().clone()
    swapped[3] = swapped[3].roll(I, 0)
    ref = reference(x, ids, weights, swapped, experts.down)
    assert row_error(y.detach().numpy(), ref.detach().numpy()) > 1e-2


def test_ids_that_mean_no_expert() -> None:
    experts = make_experts()
    x, ids, weights, d_y = inputs()
    ids[:, 1] = E
    y = experts(x, ids, weights)
    y.backward(d_y)
    ref = reference(x, ids, weights, experts.gate_up, experts.down)
    assert row_error(y.detach().numpy(), ref.detach().numpy()) <= 2e-5
    assert weights.grad is not None and (weights.grad[:, 1] == 0).all()


def test_expanded_gradient() -> None:
    """d_y of y.sum() is one number with stride 0."""
    experts = make_experts()
    x, ids, weights, _ = inputs()
    experts(x, ids, weights).sum().backward()
    assert x.grad is not None
    got = x.grad.clone()
    x.grad = None
    reference(x, ids, weights, experts.gate_up, experts.down).sum().backward()
    assert row_error(got.numpy(), x.grad.numpy()) <= 2e-5


def test_strided_input() -> None:
    experts = make_experts()
    x, ids, weights, _ = inputs()
    wide = torch.cat([x, x], 1).detach()
    expected = experts(x, ids, weights)
    assert torch.equal(experts(wide[:, :H], ids, weights), expected)
    assert torch.equal(experts(wide[:, H:], ids.int(), weights), expected)


def test_no_tokens() -> None:
    layer = make_layer()
    x = torch.empty(0, H, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (0, H) and x.grad is not None and x.grad.shape == (0, H)
    assert layer.down.grad is not None and not layer.down.grad.any()


def test_double_backward_raises() -> None:
    experts = make_experts()
    x, ids, weights, d_y = inputs()
    y = experts(x, ids, weights)
    (d_x,) = torch.autograd.grad(y, x, d_y, create_graph=True)
    with pytest.raises(RuntimeError, match="experts_backward"):
        d_x.sum().backward()


@pytest.mark.parametrize("trained", [False, True])
def test_forward_mode_raises(trained: bool) -> None:
    """Instead of tangents that are zero."""
    layer, experts = make_layer(), make_experts()
    x, ids, weights, d_y = (t.detach() for t in inputs())
    tensors = {"expert_ids": ids, "routing_weights": weights, **dict(experts.named_parameters())}

    def operator(x: torch.Tensor) -> torch.Tensor:
        values = [({"x": x} | tensors).get(n) for n in moec.torch._ops.EXPERTS.inputs]
        return torch.ops.moec.experts(*values, [], experts._text, moec.Save.ALL, 0, 0)[0]

    for parameter in (*layer.parameters(), *experts.parameters()):
        parameter.requires_grad_(trained)
    for call in (layer, operator):
        with pytest.raises(NotImplementedError, match="forward-mode"):
            torch.func.jvp(call, (x,), (d_y,))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
            call(forward_ad.make_dual(x, d_y))
        with forward_ad.dual_level():
            call(x)
    y = layer(x.requires_grad_())
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        y.backward(forward_ad.make_dual(d_y, d_y))


def test_the_routers_input_has_a_width_of_its_own() -> None:
    layer = make_layer()
    wide = {"gate_weight": torch.randn(E, 2 * H)}
    x, router_x = torch.randn(3, 4, H), torch.randn(3, 4, 2 * H)
    y, _ = layer.route(x, router_x=router_x, **wide)
    flat, _ = layer.route(x.flatten(0, 1), router_x=router_x.flatten(0, 1), **wide)
    assert torch.equal(y, flat.view(x.shape))


def test_frozen_parts_get_no_gradient() -> None:
    experts = make_experts()
    experts.gate_up.requires_grad_(False)
    x, ids, weights, d_y = inputs()
    experts(x, ids, weights).backward(d_y)
    assert experts.gate_up.grad is None and experts.down.grad is not None


def saved_bytes(run: object, own: list[torch.Tensor]) -> int:
    """Bytes that autograd keeps beside tensors that exist anyway."""
    known, seen = {t.data_ptr() for t in own}, []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in known:
            seen.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()  # type: ignore[operator]
    return sum(seen)


@pytest.mark.parametrize("save", [moec.Save.INPUT, moec.Save.PREACT, moec.Save.ALL])
def test_saved_bytes_are_the_librarys(save: moec.Save) -> None:
    context = moec.Context(num_threads=torch.get_num_threads())
    x, ids, weights, _ = inputs()
    experts = make_experts(save=save)
    desc = moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=K, save=save)
    size = moec.Experts(context, desc).sizes.saved.bytes(T)
    own = [x, ids, weights, *experts.parameters()]
    assert saved_bytes(lambda: experts(x, ids, weights), own) == size > 0
    layer = make_layer(save=save)
    whole = moec.Layer(context, moec.RouterDesc(num_experts=E, top_k=K, norm=moec.Norm.SUM), desc)
    own = [x, *layer.parameters()]
    assert saved_bytes(lambda: layer(x), own) == whole.sizes.saved.bytes(T)


def test_no_grad_saves_nothing() -> None:
    experts = make_experts()
    x, ids, weights, _ = inputs()
    expected = experts(x, ids, weights)
    sizes = []
    forward = torch.ops.moec.experts
    with torch.no_grad():
        y = experts(x, ids, weights)
        sizes.append(saved_bytes(lambda: experts(x, ids, weights), [x]))
    assert torch.equal(y, expected) and y.grad_fn is None and sizes == [0]
    with torch.inference_mode():
        assert torch.equal(experts(x, ids, weights), expected)
    names = moec.torch._ops.EXPERTS.inputs
    tensors = {"x": x, "expert_ids": ids, "routing_weights": weights,
               "gate_up": experts.gate_up, "down": experts.down}
    with torch.no_grad():
        outputs = forward(*(tensors.get(n) for n in names), [], experts._text, 0, 0, 0)
    assert outputs[-1].numel() == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    layer = make_layer()
    x, *_, d_y = inputs()
    layer(x).backward(d_y)
    expected = [x.grad, *(p.grad for p in layer.parameters())]
    for t in (x, *layer.parameters()):
        t.grad = None
    recompute(layer, x, use_reentrant=reentrant).backward(d_y)
    for want, got in zip(expected, [x.grad, *(p.grad for p in layer.parameters())], strict=True):
        assert want is not None and got is not None and torch.equal(want, got)


def test_auxiliary_loss_reaches_the_router() -> None:
    layer = make_layer()
    x, *_ = inputs()
    _, routing = layer.route(x)
    routing.logits.logsumexp(-1).square().mean().backward()
    expected = x.detach().clone().requires_grad_()
    (expected @ layer.gate_weight.T).logsumexp(-1).square().mean().backward()
    assert x.grad is not None and expected.grad is not None
    assert row_error(x.grad.numpy(), expected.grad.numpy()) <= 2e-5


def test_gradients_start_at_the_logits_only() -> None:
    """The routing weights of a layer are no place to start from, and say so."""
    layer = make_layer()
    x, *_, d_y = inputs()
    y, routing = layer.route(x)
    assert y.requires_grad and routing.logits.requires_grad
    assert not routing.routing_weights.requires_grad and not routing.expert_ids.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        routing.routing_weights.square().sum().backward()
    y.backward(d_y)
    assert layer.gate_weight.grad is not None and layer.gate_weight.grad.any()


def test_weights_live_as_long_as_the_call() -> None:
    """Shared weights at more addresses than an engine remembers: those of this call stay."""
    torch.manual_seed(1)
    experts = moec.torch.Experts(moec.ExpertsDesc(
        hidden=H, inter=I, num_experts=E, top_k=K, shared=moec.Shared.ADD, shared_inter=8))
    x, ids, weights, _ = inputs()
    held = []
    with torch.no_grad():
        expected = experts(x, ids, weights)
        for _ in range(600):
            held.append(experts.shared_expert_down.data)
            experts.shared_expert_down.data = held[-1].clone()
            assert torch.equal(experts(x, ids, weights), expected)


def test_no_experts_per_token() -> None:
    x, ids, weights, _ = inputs()
    experts = moec.torch.Experts(moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=0))
    with pytest.raises(moec.InvalidArgumentError, match="top_k is 0"):
        experts(x, ids, weights)


@pytest.mark.parametrize("name", ["gate_up", "down", "x"])
def test_tensors_of_two_devices(name: str) -> None:
    """With one on meta nothing is computed: what came out was memory that nobody had written."""
    experts = make_experts()
    x, ids, weights, _ = inputs()
    if name == "x":
        x = x.detach().to("meta")
    else:
        setattr(experts, name, torch.nn.Parameter(getattr(experts, name).to("meta")))
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"is on (cpu|meta), x on (cpu|meta)"):
        experts(x, ids, weights)


def test_meta_tensors() -> None:
    """Shapes and gradients' shapes without memory."""
    layer, experts = make_layer("meta"), make_experts("meta").use_main_grads()
    x = torch.empty(3, 5, H, device="meta", requires_grad=True)
    y, routing = layer.route(x)
    y.sum().backward()
    assert y.shape == x.shape and routing.logits.shape == (15, E)
    assert layer.down.grad is not None and layer.down.grad.shape == layer.down.shape
    ids = torch.empty(15, K, dtype=torch.int32, device="meta")
    y = experts(x, ids, torch.empty(15, K, device="meta"))
    y.sum().backward()
    assert y.is_meta and y.shape == x.shape and experts.down.main_grad.is_meta


def test_trainable_weights_are_never_stale() -> None:
    """Fused AdamW changes memory without changing a version counter; nor does .data."""
    torch.manual_seed(5)
    experts = make_experts()
    optimiser = torch.optim.AdamW(experts.parameters(), lr=1e-2, fused=True)
    x, ids, weights, d_y = inputs()
    seen = []
    for step in range(20):
        y = experts(x, ids, weights)
        ref = reference(x, ids, weights, experts.gate_up, experts.down)
        assert row_error(y.detach().numpy(), ref.detach().numpy()) <= 2e-5, step
        seen.append(y.detach().clone())
        optimiser.zero_grad()
        y.backward(d_y)
        optimiser.step()
    assert row_error(seen[0].numpy(), seen[-1].numpy()) > 1e-2
    experts.down.data.mul_(2)
    assert row_error(experts(x, ids, weights).detach().numpy(), 2 * seen[-1].numpy()) > 1e-3
    ref = reference(x, ids, weights, experts.gate_up, experts.down)
    got = experts(x, ids, weights)
    assert row_error(got.detach().numpy(), ref.detach().numpy()) <= 2e-5


def test_frozen_until_refresh() -> None:
    experts = make_experts().freeze()
    x, ids, weights, d_y = inputs()
    y = experts(x, ids, weights)
    y.backward(d_y)
    ref = reference(x, ids, weights, experts.gate_up, experts.down)
    assert row_error(y.detach().numpy(), ref.detach().numpy()) <= 2e-5
    assert experts.down.grad is None and x.grad is not None
    experts.down.data.mul_(2)
    experts.refresh()
    assert row_error(experts(x, ids, weights).detach().numpy(), 2 * ref.detach().numpy()) <= 2e-5
    assert copy.deepcopy(experts)._frozen is None
    experts.down.data = experts.down.data.clone()
    with pytest.raises(RuntimeError, match="another address"):
        experts(x, ids, weights)
    assert experts.unfreeze().down.requires_grad
    experts(x, ids, weights).backward(d_y)


def test_misaligned_weights() -> None:
    """Tensors of a memory-mapped file are aligned to their elements, no more."""
    experts = make_experts(dtype=torch.bfloat16)
    x, ids, weights, _ = inputs(0, torch.bfloat16)
    expected = experts(x, ids, weights)
    for name in ("gate_up", "down"):
        held = getattr(experts, name)
        memory = torch.empty(held.numel() + 1, dtype=held.dtype)
        moved = memory[1:].view(held.shape)
        moved.copy_(held.detach())
        assert moved.data_ptr() % 4 == 2
        setattr(experts, name, torch.nn.Parameter(moved))
    assert torch.equal(experts(x, ids, weights), expected)


ON_ONE_POOL = """
import os, torch, moec, moec.torch
from moec.torch import _engine
tasks = lambda: len(os.listdir("/proc/self/task"))
torch.set_num_threads(3)
torch.ones(1 << 20).exp()  # torch's own threads are there
before = tasks()
experts = moec.torch.Experts(moec.ExpertsDesc(hidden=64, inter=64, num_experts=8, top_k=2))
x, (weights, ids) = torch.randn(40, 64), torch.randn(40, 8).softmax(-1).topk(2)
y = experts(x, ids, weights)
y.sum().backward()
assert tasks() == before, (tasks(), before)
child = os.fork()  # has none of torch's threads: threads of its own, the same bits
if child == 0:
    same = torch.equal(experts(x, ids, weights), y)
    os._exit(0 if same and tasks() > 1 else 1)
assert os.waitpid(child, 0)[1] == 0
"""


def test_works_on_the_threads_of_torch() -> None:
    subprocess.run([sys.executable, "-c", ON_ONE_POOL], check=True, timeout=60)


def test_refusals_name_the_cause() -> None:
    experts = make_experts()
    x, ids, weights, _ = inputs()
    with pytest.raises(moec.ShapeError):
        experts(x[:, :-1], ids, weights)
    with pytest.raises(TypeError, match="float64"):
        experts(x.double(), ids, weights)
    with pytest.raises(RuntimeError, match="freeze"):
        experts.refresh()
    with pytest.raises(TypeError, match="expert_ids is of torch.int16"):
        experts(x, ids.short(), weights)
    with pytest.raises(TypeError, match="no input 'other'"):
        make_layer().route(x, other=x)
    torch.nn.utils.parametrize.register_parametrization(experts, "down", torch.nn.Tanh())
    for call in (lambda: experts(x, ids, weights), experts.freeze, experts.use_main_grads):
        with pytest.raises(TypeError, match="down is parametrized"):
            call()
    values = [{"x": x, "expert_ids": ids, "routing_weights": weights}.get(n)
              for n in moec.torch._ops.EXPERTS.inputs]
    with pytest.raises(TypeError, match="down is missing"):
        torch.ops.moec.experts(*values, [], experts._text, 0, 0, 0)


