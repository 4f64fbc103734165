# SPDX-License-Identifier: Apache-2.0
"""Adapters over plain and coded experts against PEFT's numbers, in PEFT's storage; merging; and
what is refused. Shown once to fail: B read expert by expert."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import E, H, I, assert_close

import moec
from moec import golden_codes
from moec.checkpoint import SafetensorsFile

GOLDEN = Path(__file__).parents[3] / "tests/golden"
FILES = [path for folder in ("adapters", "quant")
         for path in sorted((GOLDEN / folder).glob("*.safetensors"))
         if "lora_scale" in SafetensorsFile(path).metadata]
MATRICES = {"gate_up": "gate_up_proj", "down": "down_proj"}


def adapter_of(file: SafetensorsFile, name: str, count: int) -> moec.Adapter:
    scale = json.loads(file.metadata["lora_scale"])
    return moec.Adapter(**{
        field: moec.Factors.from_peft(file[f"lora.{name}.{matrix}.lora_A.weight"],
                                      file[f"lora.{name}.{matrix}.lora_B.weight"], count,
                                      scale[f"{name}.{matrix}"])
        for field, matrix in MATRICES.items()
    })


def cases() -> Iterator[Any]:
    for path in FILES:
        for tag, names in json.loads(SafetensorsFile(path).metadata["lora_active"]).items():
            yield pytest.param(path, tag, names, id=f"{path.stem}-{tag}")


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="needs the source tree")
@pytest.mark.parametrize(("path", "tag", "names"), list(cases()))
def test_the_numbers_of_peft(
    context: moec.Context, path: Path, tag: str, names: list[str]
) -> None:
    file = SafetensorsFile(path)
    made = golden_codes.read(file)
    weights = golden_codes._bound(context, made, moec.DType.F32)
    tokens, top_k = file["ids"].shape
    experts = moec.Experts(context, moec.ExpertsDesc(
        hidden=made.hidden, inter=made.inter, num_experts=made.count, top_k=top_k,
        save=moec.Save.ALL, activation=moec.Activation(kind=moec.ActivationKind.GPTOSS if
            file.metadata["activation"] == "gptoss" else moec.ActivationKind.SWIGLU)))
    plan = moec.Plan(context, moec.PlanDesc(max_tokens=tokens, num_experts=made.count, top_k=top_k))
    plan.from_topk(np.array(file["ids"]), file["weights"])
    layout = {"gate_then_up": moec.GateLayout.GATE_THEN_UP,
              "interleaved": moec.GateLayout.INTERLEAVED}[file.metadata["gate_layout"]]
    adapters = moec.Adapters(
        context,
        moec.AdaptersDesc(num_experts=made.count, hidden=made.hidden, inter=made.inter,
                          gate_layout=layout),
        [adapter_of(file, name, made.count) for name in names],
    )
    result = experts.forward(plan, file["x"], weights, adapters=adapters)
    grads = experts.backward(result, file["dy"], want=("x", "routing_weights", "adapters"))
    for key, got in (("y", result.y), ("dx", grads.x), ("dweights", grads.routing_weights)):
        assert_close(got, file[f"{tag}.{key}"], 1e-5)
    assert grads.adapters is not None
    for name, adapter in zip(names, grads.adapters, strict=True):
        for field, matrix in MATRICES.items():
            factors = getattr(adapter, field)
            a, b = (file[f"{tag}.{name}.{matrix}.lora_{part}.grad"] for part in "AB")
            wanted = moec.Factors.from_peft(a, b, made.count, 0)
            assert_close(factors.a, wanted.a, 1e-5)
            assert_close(factors.b, wanted.b, 1e-5)


@pytest.fixture
def adapted(problem: SimpleNamespace, rng: np.random.Generator) -> SimpleNamespace:
    """The small layer with an adapter of rank 3 beside each matrix; A of down is shared."""
    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)

    problem.adapter = moec.Adapter(
        gate_up=moec.Factors(a=normal(E, 3, H), b=normal(E, 2 * I, 3), scale=0.5),
        down=moec.Factors(a=normal(1, 3, I), b=normal(E, H, 3), scale=2.0),
    )
    problem.desc = moec.AdaptersDesc(num_experts=E, hidden=H, inter=I)
    problem.adapters = moec.Adapters(problem.context, problem.desc, [problem.adapter])
    return problem


def test_a_layer_with_adapters_is_the_merged_one(adapted: SimpleNamespace) -> None:
    p = adapted
    result = p.layer.forward(p.x, p.weights, p.gate, adapters=p.adapters)
    grads = p.layer.backward(result, p.d_y)
    assert grads.adapters[0].down.a.shape == (1, 3, I)
    before = {name: array.copy() for name, array in p.arrays.items()}
    p.adapters.merge(p.weights)
    for name, array in p.arrays.items():
        factors = getattr(p.adapter, name)
        delta = factors.scale * (factors.b.astype(np.float64) @ factors.a.astype(np.float64))
        assert_close(array, before[name] + delta, 1e-6)
    merged = p.layer.forward(p.x, p.weights, p.gate)
    assert_close(result.y, merged.y)
    full = p.layer.backward(merged, p.d_y)
    assert_close(grads.x, full.x)
    for name in p.arrays:  # with dW of the merged layer: dA = s B^T dW, dB = s dW A^T
        factors, d_w = getattr(p.adapter, name), getattr(full.expert_weights, name)
        d_a = factors.scale * (factors.b.swapaxes(1, 2) @ d_w)
        got = getattr(grads.adapters[0], name)
        assert_close(got.a, d_a if len(factors.a) == E else d_a.sum(0, keepdims=True), 1e-4)
        assert_close(got.b, factors.scale * (d_w @ factors.a.swapaxes(1, 2)), 1e-4)
    p.adapters.unmerge(p.weights)
    for name, array in p.arrays.items():
        assert_close(array, before[name], 1e-6)


def test_one_adapter_a_token(adapted: SimpleNamespace) -> None:
    p = adapted
    ids = np.where(np.arange(len(p.x)) % 2, 0, -1).astype(np.int32)
    plain = p.layer.forward(p.x, p.weights, p.gate).y
    with_it = p.layer.forward(p.x, p.weights, p.gate, adapters=p.adapters).y
    got = p.layer.forward(p.x, p.weights, p.gate, adapters=p.adapters, adapter_ids=ids).y
    assert_close(got, np.where(ids[:, None] == 0, with_it, plain), 1e-6)


def test_what_is_refused_is_named(adapted: SimpleNamespace) -> None:
    p = adapted
    good = p.adapter.gate_up
    empty = moec.Adapters(p.context, p.desc)
    with pytest.raises(moec.StateError, match="adapters are not bound"):
        p.layer.forward(p.x, p.weights, p.gate, adapters=empty)
    with pytest.raises(moec.ShapeError, match=r"list\[0\].gate_up.b"):
        empty.bind([moec.Adapter(gate_up=moec.Factors(a=good.a, b=good.b[:, :-1], scale=1))])
    with pytest.raises(moec.InvalidArgumentError, match=r"list\[0\].gate_up.scale"):
        empty.bind([moec.Adapter(gate_up=moec.Factors(a=good.a, b=good.b))])
    with pytest.raises(moec.InvalidArgumentError, match=r"list\[1\].down"):
        empty.bind([p.adapter, moec.Adapter(down=moec.Factors(a=good.a, scale=1.0))])
    with pytest.raises(TypeError, match=r"list\[0\].down is a dict; moec.Factors are needed"):
        empty.bind([moec.Adapter(down={})])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"list\[0\] is a dict; a moec.Adapter is needed"):
        empty.bind([{}])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"adapters is a list; a moec.Adapters is needed"):
        p.layer.forward(p.x, p.weights, p.gate, adapters=[p.adapter])
    with pytest.raises(TypeError, match=r"weights is None; a moec.Weights is needed"):
        p.adapters.merge(None)
    result = p.layer.forward(p.x, p.weights, p.gate, adapters=p.adapters)
    with pytest.raises(ValueError, match=r"d_adapters has 2 adapters; 1 are bound"):
        p.layer.backward(result, p.d_y, into=moec.LayerGradients(adapters=[p.adapter] * 2))
    with pytest.raises(ValueError, match=r"lora_B has the shape \[5, 7\]; .* of 4 experts"):
        moec.Factors.from_peft(np.zeros((8, 6)), np.zeros((5, 7)), 4, 1)
    with pytest.raises(ValueError, match=r"lora_A has the shape \[9, 6\]"):
        moec.Factors.from_peft(np.zeros((9, 6)), np.zeros((5, 8)), 4, 1)


def test_exchanged_factors_of_peft() -> None:
    """lora_A beside the output: the same factors, stored the other way round."""
    count, rank, inner, outer = 4, 2, 6, 5
    lora_a = np.arange(count * rank * outer).reshape(count * rank, outer)
    lora_b = np.arange(inner * rank * count).reshape(inner, rank * count)
    held = moec.Factors.from_peft(lora_a, lora_b, count, 1.0, exchanged=True)
    for e in range(count):
        for j in range(rank):
            assert np.array_equal(held.a[e, j], lora_b[:, j * count + e])
            assert np.array_equal(held.b[e, :, j], lora_a[e * rank + j])


@pytest.fixture
def coded(context: moec.Context) -> SimpleNamespace:
    """NF4 experts of a file, and its adapter."""
    file = SafetensorsFile(GOLDEN / "quant/bnb_nf4_stack_nested.safetensors")
    made = golden_codes.read(file)
    desc = moec.AdaptersDesc(num_experts=made.count, hidden=made.hidden, inter=made.inter)
    adapter = adapter_of(file, "a", made.count)
    return SimpleNamespace(context=context, adapter=adapter, count=made.count,
                           weights=golden_codes._bound(context, made, moec.DType.F32),
                           adapters=moec.Adapters(context, desc, [adapter]))


needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="needs the source tree")


@needs_golden
def test_codes_are_merged_into_copies_only(coded: SimpleNamespace) -> None:
    with pytest.raises(moec.UnsupportedError, match="quantised; moec_adapters_merge_copy"):
        coded.adapters.merge(coded.weights)
    for name, matrix in (("gate_up", moec.MatrixName.GATE_UP), ("down", moec.MatrixName.DOWN)):
        factors = getattr(coded.adapter, name)
        want = np.stack([coded.weights.dequantise(matrix, e) for e in range(coded.count)])
        want = want + factors.scale * (factors.b.astype(np.float64) @ factors.a)
        assert_close(coded.adapters.merge_copy(coded.weights, matrix), want, 1e-6)
        given = np.empty(want.shape, np.float16)
        assert coded.adapters.merge_copy(coded.weights, matrix, out=given) is given
        assert_close(given.astype(np.float32), want, 1e-3)


@needs_golden
@pytest.mark.parametrize(("kind", "options"), [
    *((kind, {}) for kind in moec.QuantiseKind), ("nf4", {"nested": True}),
    ("int4", {"block_k": 32, "asymmetric": True}), ("fp8", {"block_n": 32, "block_k": 32}),
])
def test_merged_codes_are_those_of_the_merged_values(
    coded: SimpleNamespace, kind: Any, options: dict[str, Any]
) -> None:
    values = coded.adapters.merge_copy(coded.weights, moec.MatrixName.DOWN)
    want = moec.quantise(coded.context, values, kind, **options)
    got = coded.adapters.merge_quantised(coded.weights, moec.MatrixName.DOWN, kind, **options)
    assert got.scheme == want.scheme and got.codes.tobytes() == want.codes.tobytes()
    assert got.quant.scales.tobytes() == want.quant.scales.tobytes()


@needs_golden
def test_what_a_copy_refuses_is_named(coded: SimpleNamespace) -> None:
    p, down = coded, moec.MatrixName.DOWN
    only = moec.Adapters(p.context, p.adapters.desc, [moec.Adapter(down=p.adapter.down)])
    with pytest.raises(moec.InvalidArgumentError, match="nothing is merged"):
        only.merge_copy(p.weights, moec.MatrixName.GATE_UP)
    with pytest.raises(TypeError, match="weights is None; a moec.Weights is needed"):
        p.adapters.merge_quantised(None, down, "nf4")
    with pytest.raises(ValueError, match="kind is 'nf5'"):
        p.adapters.merge_quantised(p.weights, down, "nf5")
    with pytest.raises(TypeError, match="block"):
        p.adapters.merge_quantised(p.weights, down, "nf4", block=64)
    with pytest.raises(moec.ShapeError, match="values"):
        p.adapters.merge_copy(p.weights, down, out=np.empty((1, 2, 3), np.float32))
