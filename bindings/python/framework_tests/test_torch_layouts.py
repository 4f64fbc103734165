# SPDX-License-Identifier: Apache-2.0
"""Parameters that moec.torch reads where they lie: fp32 under autocast, transposed experts, experts
apart. What a call takes follows the experts in use, not all of them."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch_cases import E, H, I, K, inputs, make_experts

import moec
import moec.torch
from moec.torch import _layouts


def turned(held: Tensor) -> Tensor:
    return held.transpose(1, 2).contiguous().transpose(1, 2)


def apart(held: Tensor) -> Tensor:
    """Each expert contiguous, another one's room behind it."""
    return held.repeat_interleave(2, 0)[::2]


def turned_apart(held: Tensor) -> Tensor:
    return apart(held.transpose(1, 2).contiguous()).transpose(1, 2)


def thinned(held: Tensor) -> Tensor:
    """Nothing about an expert is contiguous."""
    return held.repeat_interleave(2, -1)[..., ::2]


def with_strides(change: Callable[[Tensor], Tensor], *names: str, **options: object
                 ) -> moec.torch.Experts:
    experts = make_experts(**options)
    for name in names:
        setattr(experts, name, torch.nn.Parameter(change(getattr(experts, name).detach())))
    return experts


def results(experts: moec.torch.Experts, dtype: torch.dtype | None = None) -> list[Tensor]:
    """y and all gradients; dtype: of autocast."""
    x, ids, weights, d_y = inputs()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        y = experts(x, ids, weights)
    y.backward(d_y.to(y.dtype))
    return [y, x.grad, weights.grad, *(p.grad for p in experts.parameters())]


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A matrix that would be copied raises."""
    monkeypatch.setattr(_layouts, "_copied", set())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "moec.torch")
        yield


@pytest.mark.parametrize("change", [turned, apart, turned_apart])
@pytest.mark.parametrize("names", [("down",), ("gate_up",), ("down", "gate_up")])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_strides_are_read_in_place(
    change: Callable[[Tensor], Tensor], names: tuple[str, ...], dtype: torch.dtype | None,
    no_copies: None,
) -> None:
    """The bits of contiguous parameters; gradients lie as dense parameters do."""
    experts = with_strides(change, *names)
    for got, want in zip(results(experts, dtype), results(make_experts(), dtype), strict=True):
        assert torch.equal(got, want)
    if change is turned:
        assert all(p.grad.stride() == p.stride() for p in experts.parameters())


@pytest.mark.parametrize("change", [turned, apart, turned_apart])
def test_such_parameters_can_be_frozen(change: Callable[[Tensor], Tensor], no_copies: None
                                       ) -> None:
    x, ids, weights, _ = inputs()
    experts = with_strides(change, "down", "gate_up").freeze()
    assert torch.equal(experts(x, ids, weights), make_experts()(x, ids, weights))


def test_gate_and_up_of_two_orientations() -> None:
    """One of them is copied."""
    options = {"gate_layout": moec.GateLayout.SPLIT}
    experts = with_strides(turned, "up", **options)
    _layouts._copied.clear()
    with pytest.warns(UserWarning, match=r"up \[8, 24, 32\] has the strides \[768, 1, 24\]"):
        got = results(experts)
    for one, want in zip(got, results(make_experts(**options)), strict=True):
        assert torch.equal(one, want)
    with pytest.raises(ValueError, match="up .* has the strides"):
        experts.freeze()


def test_other_strides_are_copied_with_one_warning() -> None:
    experts = with_strides(thinned, "down")
    x, ids, weights, _ = inputs()
    _layouts._copied.clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            y = experts(x, ids, weights)
    assert torch.equal(y, make_experts()(x, ids, weights))
    assert [str(w.message).split(",")[0] for w in seen] == ["moec.torch: down [8"]
    assert "[1536, 48, 2]" in str(seen[0].message)
    with pytest.raises(ValueError, match=r"down \[8, 32, 24\] has the strides \[1536, 48, 2\]"):
        experts.freeze()
    assert experts.down.requires_grad and experts._frozen is None


@pytest.mark.parametrize("change", [turned, apart, thinned])
def test_main_gradients_of_such_parameters(change: Callable[[Tensor], Tensor]) -> None:
    """They are contiguous, and so is what the call reads beside them."""
    found = []
    for experts in (with_strides(change, "down"), make_experts()):
        experts.use_main_grads()
        results(experts)
        found.append([p.main_grad for p in experts.parameters()])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("change", [turned, apart])
def test_compiled(change: Callable[[Tensor], Tensor], no_copies: None) -> None:
    experts = with_strides(change, "down", "gate_up")
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    for dtype in (None, torch.bfloat16):
        got = results(compiled, dtype)
        experts.zero_grad()
        want = results(experts, dtype)
        experts.zero_grad()
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_autocast_reads_fp32(dtype: torch.dtype, bias: bool) -> None:
    """The bits of casting the matrices before the call; biases are added as they are, gradients in
    fp32."""
    experts = make_experts(bias=bias)
    with torch.no_grad():
        for name, parameter in experts.named_parameters():
            if name.endswith("_bias"):
                parameter.copy_(parameter.normal_().to(dtype))
    got = results(experts, dtype)
    low = make_experts(bias=bias, dtype=dtype)
    with torch.no_grad():
        for a, b in zip(low.parameters(), experts.parameters(), strict=True):
            a.copy_(b)
    x, ids, weights, d_y = inputs()
    y = low(x.to(dtype), ids, weights)
    y.backward(d_y.to(dtype))
    assert got[0].dtype == dtype and torch.equal(got[0], y)
    assert torch.equal(got[1], x.grad) and torch.equal(got[2], weights.grad)
    for a, b in zip(experts.parameters(), low.parameters(), strict=True):
        assert a.grad.dtype == torch.float32
        assert torch.equal(a.grad.to(dtype), b.grad)


def _peak(call: Callable[[], object]) -> int:
    """Bytes that the process grew by while it ran."""
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    done = threading.Event()
    top = base = resident()

    def watch() -> None:
        nonlocal top
        while not done.is_set():
            top = max(top, resident())
            time.sleep(0.0005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        call()
    finally:
        done.set()
        thread.join()
    return max(top, resident()) - base


def _of_72_mib(
    change: Callable[[Tensor], Tensor] | None,
) -> tuple[moec.torch.Experts, tuple[Tensor, Tensor, Tensor]]:
    """Experts in fp32 whose parameters are changed, and one token of theirs."""
    desc = moec.ExpertsDesc(hidden=256, inter=128, num_experts=192, top_k=K)
    experts = moec.torch.Experts(desc)
    if change:
        for name in ("gate_up", "down"):
            setattr(experts, name, torch.nn.Parameter(change(getattr(experts, name).detach())))
    return experts, (torch.randn(1, 256), torch.arange(K)[None], torch.rand(1, K))


@pytest.mark.parametrize("change", [None, turned, apart])
def test_no_copy_of_a_stack(change: Callable[[Tensor], Tensor] | None) -> None:
    """One token of 192 experts, 72 MiB of fp32, under autocast. Casting them took 36 MiB more."""
    experts, given = _of_72_mib(change)

    def call() -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            experts(*given)

    call()
    assert _peak(call) < 8 << 20


@pytest.mark.parametrize("change", [None, turned])
def test_a_step_makes_no_copy_of_a_stack(change: Callable[[Tensor], Tensor] | None) -> None:
    """Beside gradients in fp32, 72 MiB: neither cast matrices nor gradients of 16 bits."""
    experts, given = _of_72_mib(change)

    def call() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            y = experts(*given)
        y.backward(torch.ones_like(y))

    call()
    assert all(p.grad.dtype == torch.float32 for p in experts.parameters())
    experts.zero_grad()
    assert _peak(call) < (72 + 12) << 20


def test_shapes_of_one_row() -> None:
    """A matrix of one row is contiguous and transposed at once."""
    held = torch.randn(E, 1, I)
    assert _layouts.is_turned(held) is False
    assert _layouts.is_turned(torch.randn(E, I, 1).transpose(1, 2)) is False
    assert _layouts.is_turned(turned(torch.randn(E, H, I))) is True
    assert _layouts.is_turned(thinned(torch.randn(E, H, I))) is None
