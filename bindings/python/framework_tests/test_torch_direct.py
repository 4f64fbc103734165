# SPDX-License-Identifier: Apache-2.0
"""Calls past torch's dispatcher give what the operators give, and are made only where nobody would
have seen an operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_cases import H, Watch, inputs, make_experts, step

import moec.torch
from moec.torch import _direct


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each call is made directly."""
    asked: list[bool] = []
    plain = _direct.plain

    def ask(tensors: Any) -> bool:
        asked.append(plain(tensors))
        return asked[-1]

    with monkeypatch.context() as patch:
        patch.setattr(moec.torch._ops, "plain", ask)
        yield asked


@pytest.mark.parametrize("main_grads", [False, True])
@pytest.mark.parametrize("kind", ["experts", "layer"])
def test_the_same_bits(kind: str, main_grads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mode that sees the operators, and without one."""
    with counted(monkeypatch) as asked:
        directly = step(kind, main_grads)
    assert asked == [True, True]
    with Watch() as watch, counted(monkeypatch) as asked:
        by_operators = step(kind, main_grads)
    assert asked == [False, False]
    assert watch.seen == [kind, f"{kind}_accumulate" if main_grads else f"{kind}_backward"]
    assert len(directly) == len(by_operators)
    for a, b in zip(directly, by_operators, strict=True):
        assert torch.equal(a, b)


def test_a_forward_of_one_kind_and_a_backward_of_the_other() -> None:
    x, ids, weights, d_y = inputs()
    experts = make_experts()
    experts(x, ids, weights).backward(d_y)
    expected, x.grad = x.grad, None
    with Watch() as watch:
        y = experts(x, ids, weights)
    y.backward(d_y)
    assert watch.seen == ["experts"] and torch.equal(x.grad, expected)
    x.grad = None
    y = experts(x, ids, weights)
    with Watch() as watch:
        y.backward(d_y)
    assert watch.seen == ["experts_backward"] and torch.equal(x.grad, expected)


def test_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    x, ids, weights, _ = inputs()
    experts = make_experts()
    expected = experts(x, ids, weights).detach()
    with counted(monkeypatch) as asked, torch.no_grad():
        y = experts(x, ids, weights)
    assert asked == [True] and torch.equal(y, expected) and y.grad_fn is None
    with torch.inference_mode():
        assert torch.equal(experts(x, ids, weights), expected)
    experts.requires_grad_(False)
    y = experts(x.detach(), ids, weights.detach())
    assert torch.equal(y, expected) and y.grad_fn is None


def test_gradients_of_several_at_once() -> None:
    """is_grads_batched hands vmap's tensors, which have no memory."""
    x, ids, weights, d_y = inputs()
    y = make_experts()(x, ids, weights)
    (one,) = torch.autograd.grad(y, x, d_y, retain_graph=True)
    (both,) = torch.autograd.grad(y, x, torch.stack([d_y, 2 * d_y]), is_grads_batched=True)
    assert torch.equal(both[0], one) and torch.equal(both[1], 2 * one)


def test_a_graph_is_used_twice() -> None:
    x, ids, weights, d_y = inputs()
    y = make_experts()(x, ids, weights)
    grads = [torch.autograd.grad(y, x, d_y, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_changed_input_is_noticed(changed: int) -> None:
    x, ids, weights, d_y = inputs()
    y = make_experts()(x, ids, weights)
    with torch.no_grad():
        (x, ids, weights)[changed].add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(d_y)


def test_main_gradients_count_as_changed() -> None:
    experts = make_experts().use_main_grads()
    x, ids, weights, d_y = inputs()
    before = experts.down.main_grad._version
    experts(x, ids, weights).backward(d_y)
    assert experts.down.main_grad._version > before


def test_saved_tensors_go_through_hooks() -> None:
    x, ids, weights, d_y = inputs()
    experts = make_experts()
    experts(x, ids, weights).backward(d_y)
    expected, x.grad = x.grad, None
    packed: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = experts(x, ids, weights)
    y.backward(d_y)
    assert x.shape in packed and torch.equal(x.grad, expected)


class Named(Tensor):
    """A tensor of a class of its own."""


def test_other_classes_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    x, ids, weights, _ = inputs()
    experts = make_experts()
    expected = experts(x, ids, weights)
    with counted(monkeypatch) as asked:
        y = experts(x.detach().as_subclass(Named), ids, weights)
        meta = experts.to("meta")(x.to("meta"), ids.to("meta"), weights.to("meta"))
    assert asked == [False, False]
    assert torch.equal(y, expected) and meta.shape == (len(x), H) and meta.is_meta


def test_a_traced_module() -> None:
    experts = make_experts()
    x, ids, weights, _ = (t.detach() for t in inputs())
    traced = torch.jit.trace(experts, (x, ids, weights), check_trace=False)
    assert "moec::experts" in str(traced.inlined_graph)
    assert torch.equal(traced(x, ids, weights), experts(x, ids, weights))


@pytest.mark.parametrize("openmp", [False, True])
def test_a_number_of_threads_below_0(openmp: bool) -> None:
    """Refused with the threads of an OpenMP runtime, too, which this process has: torch's."""
    with pytest.raises(moec.InvalidArgumentError, match="num_threads is -1"):
        moec.Context(num_threads=-1, openmp=openmp)
