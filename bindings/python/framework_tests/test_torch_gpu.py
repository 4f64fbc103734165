# SPDX-License-Identifier: Apache-2.0
"""moec.torch on CUDA tensors: results, streams, CUDA graphs. Run by `-m gpu` on a GPU machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import FAMILIES
from torch_cases import E, K, Watch, compare, make_experts, reference, run_golden, step

import moec
from moec.golden import row_error

pytestmark = pytest.mark.gpu
T, H, I = 200, 256, 128  # noqa: E741
BF16 = 2e-2  # three roundings of bf16, in the worst of all rows
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU here")


def experts_on_gpu(**options: object) -> moec.torch.Experts:
    torch.manual_seed(1)
    desc = moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=K)
    return moec.torch.Experts(desc, **options).to("cuda", torch.bfloat16)


def inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, H, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
    weights, ids = torch.randn(T, E, generator=generator).softmax(-1).topk(K)
    d_y = torch.randn(T, H, generator=generator).to("cuda", torch.bfloat16)
    return x, ids.cuda(), weights.cuda().requires_grad_(), d_y


def test_against_autograd() -> None:
    compare(experts_on_gpu(), *inputs(), BF16)


@pytest.mark.parametrize("family", FAMILIES)
def test_golden(family: str) -> None:
    run_golden(family, "cuda")


def test_cpu_tensors_still_work() -> None:
    assert make_experts()(*(t.cpu() for t in _cpu_inputs())).shape == (5, 32)


def _cpu_inputs() -> tuple[torch.Tensor, ...]:
    return torch.randn(5, 32), torch.zeros(5, K, dtype=torch.int32), torch.ones(5, K)


def test_runs_on_the_current_stream() -> None:
    """Work queued behind a long one on a side stream sees what that one wrote."""
    experts = experts_on_gpu()
    x, ids, weights, d_y = inputs()
    expected = experts(x, ids, weights)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    late = torch.zeros_like(x)
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        late.copy_(x.detach())
        y = experts(late.requires_grad_(), ids, weights)
        (d_x,) = torch.autograd.grad(y, late, d_y)
    side.synchronize()
    assert torch.equal(y, expected)
    assert torch.equal(d_x, torch.autograd.grad(expected, x, d_y)[0])


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.parametrize("own", [True, False])
def test_graph_capture_and_other_routing(own: bool, is_adapted: bool, with_gradients: bool) -> None:
    """One captured forward, or a step, replayed with another batch and routing. Captured on the
    stream of the steps before it, or on torch's own."""
    experts = experts_on_gpu()
    if is_adapted:
        experts.add_adapter("default", 16)
        for factor in experts.adapters["default"].values():
            torch.nn.init.normal_(factor.b, std=0.1)
    x, ids, weights, d_y = (t.detach().clone() for t in inputs(0))
    x.requires_grad_()
    leaves = [x, *(p for p in experts.parameters() if p.requires_grad)]

    def step() -> list[torch.Tensor]:
        with torch.set_grad_enabled(with_gradients):
            y = experts(x, ids, weights)
        return [y, *(torch.autograd.grad(y, leaves, d_y) if with_gradients else ())]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side if own else None):
        captured = step()
    for seed in (1, 2, 3):
        other = inputs(seed)
        with torch.no_grad():
            for held, new in zip((x, ids, weights, d_y), other, strict=True):
                held.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        expected = step()
        for place, (a, b) in enumerate(zip(captured, expected, strict=True)):
            assert torch.equal(a, b), f"result {place} of batch {seed}"


def step_on(device: int) -> list[torch.Tensor]:
    """Forward and backward on one GPU, whichever is current: y, then gradients."""
    experts = experts_on_gpu().to(f"cuda:{device}")
    x, ids, weights, d_y = (t.detach().to(f"cuda:{device}") for t in inputs())
    leaves = [x.requires_grad_(), weights.requires_grad_(), experts.gate_up, experts.down]
    y = experts(x, ids, weights)
    return [y, *torch.autograd.grad(y, leaves, d_y)]


@two_gpus
def test_every_gpu_gives_the_same_bits() -> None:
    """All are queued before a result is read; the first one stays current."""
    results = [step_on(device) for device in range(torch.cuda.device_count())]
    assert torch.cuda.current_device() == 0
    for device, result in enumerate(results):
        for name, a, b in zip(("y", "x", "weights", "gate_up", "down"), results[0], result,
                              strict=True):
            assert b.device.index == device
            assert torch.equal(a.cpu(), b.cpu()), f"{name} on GPU {device}"


@two_gpus
@pytest.mark.parametrize("name", ["x", "ids", "weights", "parameters"])
def test_tensors_of_two_gpus_are_refused(name: str) -> None:
    experts = experts_on_gpu()
    x, ids, weights, _ = inputs()
    given = {"x": x, "ids": ids, "weights": weights}
    if name == "parameters":
        experts.to("cuda:1")
    else:
        given[name] = given[name].detach().to("cuda:1")
    with pytest.raises(moec.DeviceError, match="on cuda:[01]; expected cuda:[01]"):
        experts(given["x"], given["ids"], given["weights"])
    assert torch.cuda.current_device() == 0
    experts.to("cuda:0")(x, ids, weights)  # nothing is lost
    torch.cuda.synchronize()


def test_steady_state_allocates_nothing() -> None:
    experts = experts_on_gpu()
    x, ids, weights, d_y = inputs()
    context = moec.torch._engine.context_of(x.device)
    for _ in range(3):
        experts(x, ids, weights).backward(d_y)
    before = context.stats()
    for _ in range(5):
        experts(x, ids, weights).backward(d_y)
    after = context.stats()
    assert (after.allocs, after.host_syncs) == (before.allocs, before.host_syncs)


@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("is_turned", [False, True])
def test_autocast_of_fp32_experts_copies_no_stack(tokens: int, is_turned: bool) -> None:
    """1.5 GiB of fp32 experts, 768 MiB when cast: neither torch's allocator, which has the
    workspaces, nor the context's own takes a part of that. Gradients are in fp32."""
    hidden, inter, experts_count, spare = 1024, 512, 256, 128 << 20
    desc = moec.ExpertsDesc(hidden=hidden, inter=inter, num_experts=experts_count, top_k=K)
    with torch.device("cuda"):
        experts = moec.torch.Experts(desc)
    if is_turned:
        for name in ("gate_up", "down"):
            held = getattr(experts, name).detach().transpose(1, 2).contiguous().transpose(1, 2)
            setattr(experts, name, torch.nn.Parameter(held))
    x = torch.randn(tokens, hidden, device="cuda", requires_grad=True)
    ids = torch.stack([torch.randperm(experts_count)[:K] for _ in range(tokens)]).cuda()
    weights = torch.rand(tokens, K, device="cuda", requires_grad=True)
    context = moec.torch._engine.context_of(x.device)

    def grown(call: Callable[[], object]) -> int:
        """Bytes by which torch's memory, and the most that the context ever held, grew."""
        torch.cuda.synchronize()
        base, before = torch.cuda.memory_allocated(), context.stats().workspace_peak
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        own = context.stats().workspace_peak - before
        return torch.cuda.max_memory_allocated() - base + own

    def forward() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return experts(x, ids, weights)

    with torch.no_grad():
        assert grown(forward) < spare
    found: list[torch.Tensor] = []
    assert grown(lambda: found.append(forward())) < spare
    (y,) = found
    assert y.dtype == torch.bfloat16
    stacks = sum(p.nbytes for p in experts.parameters())
    assert grown(lambda: y.backward(torch.ones_like(y))) < stacks + spare
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in experts.parameters())


def test_trainable_weights_are_never_stale() -> None:
    experts = experts_on_gpu()
    optimiser = torch.optim.AdamW(experts.parameters(), lr=1e-2, fused=True)
    x, ids, weights, d_y = inputs()
    for step in range(20):
        y = experts(x, ids, weights)
        ref = reference(x.float(), ids, weights, experts.gate_up.float(), experts.down.float())
        error = row_error(y.detach().float().cpu().numpy(), ref.detach().cpu().numpy())
        assert error <= BF16, step
        optimiser.zero_grad()
        y.backward(d_y)
        optimiser.step()


def test_compiled() -> None:
    experts = experts_on_gpu()
    x, ids, weights, _ = inputs()
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(x, ids, weights), experts(x, ids, weights))


def test_dlpack() -> None:
    """The package's own API on CUDA tensors, through DLPack."""
    x, ids, weights, _ = (t.detach() for t in inputs())
    experts = experts_on_gpu()
    context = moec.Context("cuda")
    plan = moec.Plan(context, moec.PlanDesc(max_tokens=T, num_experts=E, top_k=K))
    plan.from_topk(ids, weights)
    bound = moec.Weights.of(context, gate_up=experts.gate_up.detach(), down=experts.down.detach())
    desc = moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=K, dtype="bf16")
    y = moec.Experts(context, desc).forward(plan, x, bound).y
    context.sync()
    assert torch.equal(y, experts(x, ids, weights))


def test_frozen_values_are_read_again() -> None:
    experts = experts_on_gpu()
    x, ids, weights, _ = inputs(0)
    with torch.no_grad():
        expected = experts(x, ids, weights) * 2
        experts.freeze()
        experts.down.mul_(2)
        experts.refresh()
        assert torch.equal(experts(x, ids, weights), expected)


def test_main_gradients_follow_their_module() -> None:
    experts = experts_on_gpu().cpu().use_main_grads().cuda()
    x, ids, weights, d_y = inputs(0)
    experts(x, ids, weights).backward(d_y)
    assert experts.down.main_grad.is_cuda and experts.down.main_grad.any()


@pytest.mark.parametrize("kind", ["experts", "layer"])
def test_directly_and_by_operators(kind: str) -> None:
    directly = step(kind, device="cuda")
    with Watch() as watch:
        by_operators = step(kind, device="cuda")
    assert watch.seen == [kind, f"{kind}_backward"]
    for a, b in zip(directly, by_operators, strict=True):
        assert a.is_cuda and torch.equal(a, b)
