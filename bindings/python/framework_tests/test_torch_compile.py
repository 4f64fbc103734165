# SPDX-License-Identifier: Apache-2.0
"""moec.torch under torch.compile, opcheck and gradient accumulation in a compiled graph."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch_cases import E, H, I, K, inputs, make_experts, make_layer

import moec
from moec import _spec
from moec.torch import PackedTensor, Store, _ops


def test_opcheck_of_the_experts() -> None:
    experts = make_experts(bias=True)
    x, ids, weights, d_y = inputs()
    tensors = {"x": x, "expert_ids": ids, "routing_weights": weights,
               **dict(experts.named_parameters())}
    values = [tensors.get(n) for n in _ops.EXPERTS.inputs]
    settings = (experts._text, int(moec.Save.PREACT), 0, 0)
    torch.library.opcheck(_ops.EXPERTS.forward, (*values, [], *settings))
    saved = _ops.EXPERTS.forward(*values, [], *settings)[1]
    plain = [v if v is None else v.detach() for v in values]
    want = (1 << len(_ops.EXPERTS.grads)) - 1
    torch.library.opcheck(_ops.EXPERTS.backward, (d_y, None, saved, *plain, want, *settings))
    mains = [torch.zeros_like(p) for p in experts._routed().values()]
    torch.library.opcheck(
        _ops.EXPERTS.accumulate, (d_y, None, saved, *plain, mains, want, *settings)
    )


def test_opcheck_of_the_layer() -> None:
    layer = make_layer()
    x, *_ = inputs()
    tensors = {"x": x, **dict(layer.named_parameters())}
    values = [tensors.get(n) for n in _ops.LAYER.inputs]
    settings = (layer._text, int(moec.Save.INPUT), 0, 0)
    torch.library.opcheck(_ops.LAYER.forward, (*values, [], *settings))


def test_one_graph_for_every_batch() -> None:
    """T = 1 is a graph of its own, as torch has it; all others share the second."""
    layer = make_layer()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for tokens in range(1, 17):
        x = torch.randn(tokens, H, requires_grad=True)
        y = compiled(x)
        leaves = [x, *layer.parameters()]
        got = torch.autograd.grad(y.square().sum(), leaves)
        expected = layer(x)
        assert torch.equal(y, expected)
        want = torch.autograd.grad(expected.square().sum(), leaves)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert counter.frame_count <= 2


def test_inductor() -> None:
    """The default compiler, around other operators, without and with gradients."""
    experts = make_experts()
    x, ids, weights, d_y = inputs()

    def block(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x + experts(torch.relu(x), ids, weights * 0.5)

    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    leaves = [x, weights, *experts.parameters()]
    got = torch.autograd.grad(compiled(x, weights), leaves, d_y)
    want = torch.autograd.grad(block(x, weights), leaves, d_y)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_inference_graph() -> None:
    experts = make_experts().freeze()
    x, ids, weights, _ = inputs()
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x, ids, weights), experts(x, ids, weights))


@pytest.mark.parametrize("reentrant", [False])
def test_compiled_checkpoint(reentrant: bool) -> None:
    layer = make_layer()
    x, *_ = inputs()

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(x).square().sum(), [x, *layer.parameters()])
    want = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_autocast_is_traced() -> None:
    layer = make_layer()
    x, *_ = inputs()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = compiled(x), layer(x)
    assert got.dtype == torch.bfloat16 and torch.equal(got, expected)


def test_compiled_main_gradients() -> None:
    """The mutating backward operator in a compiled graph."""
    experts, eager = make_experts().use_main_grads(), make_experts().use_main_grads()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        x, ids, weights, d_y = inputs(seed)
        compiled(x, ids, weights).backward(d_y)
        d_x, x.grad = x.grad, None
        eager(x, ids, weights).backward(d_y)
        assert torch.equal(d_x, x.grad)
    assert torch.equal(experts.down.main_grad, eager.down.main_grad)
    assert experts.down.main_grad.abs().max() > 0


def test_compiled_main_gradients_of_a_copy() -> None:
    """They are missing when the graph is traced, and again later."""
    experts = make_experts().use_main_grads()
    copied = copy.deepcopy(experts)
    compiled = torch.compile(copied, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        x, ids, weights, d_y = inputs(seed)
        for parameter in experts.parameters():
            parameter.main_grad.zero_()
        experts(x, ids, weights).backward(d_y)
        compiled(x, ids, weights).backward(d_y)
        for name, parameter in copied.named_parameters():
            assert torch.equal(parameter.main_grad, getattr(experts, name).main_grad)
            parameter.main_grad = None


def packed_stack(rows: int, columns: int) -> PackedTensor:
    """Random MXFP4 of 4 experts."""
    blocks = (4, rows, columns // 32)
    parts = {"_blocks": torch.randint(256, (*blocks, 16), dtype=torch.uint8),
             "_scales": torch.randint(120, 123, blocks, dtype=torch.uint8)}
    return PackedTensor(parts, Store("mxfp4", 4), (4, rows, columns), torch.float32)


def packed_module(is_layer: bool) -> tuple[moec.torch.Experts | moec.torch.MoELayer, list[Any]]:
    """A module of packed matrices and plain biases, with an adapter, and inputs for it."""
    torch.manual_seed(2)
    desc = moec.ExpertsDesc(hidden=64, inter=32, num_experts=4, top_k=2)
    options: dict[str, Any] = {
        "bias": True, "packed": {"gate_up": packed_stack(64, 64), "down": packed_stack(64, 32)}}
    weights, ids = torch.randn(6, 4).softmax(-1).topk(2)
    x = torch.randn(6, 64, requires_grad=True)
    if is_layer:
        router = moec.RouterDesc(num_experts=4, top_k=2)
        return moec.torch.MoELayer(router, desc, **options), [x]
    return moec.torch.Experts(desc, **options), [x, ids, weights.requires_grad_()]


@pytest.mark.parametrize("is_layer", [False, True])
@pytest.mark.parametrize("is_adapted", [False, True])
def test_packed_matrices_are_in_one_graph(is_layer: bool, is_adapted: bool) -> None:
    module, given = packed_module(is_layer)
    if is_adapted:
        module.add_adapter("default", 4)
        torch.nn.init.normal_(module.adapters["default"]["down"].b)
    leaves = [given[0], *(p for p in module.parameters() if p.requires_grad)]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        y, want_y = compiled(*given), module(*given)
        got, want = (torch.autograd.grad(one.square().sum(), leaves) for one in (y, want_y))
        assert torch.equal(y, want_y)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        with torch.no_grad():
            module.down_bias.add_(1)


def test_a_graph_of_other_packed_matrices_raises() -> None:
    """Codes that changed in place, and others in their place."""
    module, given = packed_module(is_layer=False)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        compiled(*given)
        module.down.parts["_scales"].add_(1)
        with pytest.raises(RuntimeError, match="compile again"):
            compiled(*given)
        torch.compiler.reset()
        assert torch.equal(compiled(*given), module(*given))
        module.gate_up = torch.nn.Parameter(packed_stack(64, 64), requires_grad=False)
        with pytest.raises(RuntimeError, match="compile again"):
            compiled(*given)


def test_a_kept_graph_is_for_one_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps compiled graphs on disk, and asks neither sizes nor gradients of an operator
    again; an environment that gets another moec has them still."""
    found = []
    with fresh_cache():
        for build in ("first", "first", "second"):
            torch.compiler.reset()
            counters.clear()
            monkeypatch.setattr(_spec, "build_of", lambda _, build=build: build)
            torch.compile(make_layer())(torch.randn(5, H)).sum().backward()
            found.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert found == [0, 1, 0]


def test_the_build_is_what_graphs_depend_on(tmp_path: Path) -> None:
    def build(file: str, content: str) -> str:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(content)
        _spec.build_of.cache_clear()
        return _spec.build_of(tmp_path)

    files = "_spec.py", "torch/_ops.py", "lib/libmoec.so.0", "lib/libmoec_cuda.so.0"
    builds = [build(file, content) for content in ("1", "2") for file in files]
    assert len(set(builds)) == len(builds)
    assert build("cli/path.py", "1") == builds[-1]


def test_export() -> None:
    layer = make_layer()
    x = torch.randn(5, H)
    tokens = torch.export.Dim("tokens", min=2, max=64)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: tokens},))
    other = torch.randn(9, H)
    assert torch.equal(program.module()(other), layer(other))
    assert (E, I, K) == (layer.desc.num_experts, layer.desc.inter, layer.desc.top_k)
