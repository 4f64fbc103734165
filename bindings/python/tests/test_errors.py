# SPDX-License-Identifier: Apache-2.0
"""Every kind of refusal arrives as its exception, in the library's words; outputs are untouched."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import moec
from conftest import E, H, K, T, small_experts, small_router


def plan_desc(**more: object) -> moec.PlanDesc:
    return moec.PlanDesc(**{"max_tokens": T, "num_experts": E, "top_k": K} | more)


def other_layer(p: SimpleNamespace, **experts: object) -> moec.Layer:
    return moec.Layer(p.context, small_router(), small_experts(**experts))


CASES: dict[str, tuple[type[Exception], str, Callable[[SimpleNamespace], object]]] = {
    "x of another width": (
        moec.ShapeError, "MOEC_E_SHAPE",
        lambda p: p.layer.forward(p.x[:, : H - 1].copy(), p.weights, p.gate)),
    "gate of another count": (
        moec.ShapeError, "MOEC_E_SHAPE",
        lambda p: p.layer.forward(p.x, p.weights, p.gate[:-1].copy())),
    "integer x": (
        moec.DTypeError, "MOEC_E_DTYPE",
        lambda p: p.layer.forward(p.x.astype(np.int32), p.weights, p.gate)),
    "weights that are not bound": (
        moec.StateError, "MOEC_E_INVALID_STATE",
        lambda p: p.layer.forward(
            p.x, moec.Weights(p.context, p.weights.desc), p.gate)),
    "weights of another width": (
        moec.MismatchError, "MOEC_E_MISMATCH",
        lambda p: p.layer.forward(p.x, moec.Weights.of(
            p.context, gate_up=np.zeros((E, 8, H), np.float32),
            down=np.zeros((E, H, 4), np.float32)), p.gate)),
    "top_k beyond the experts": (
        moec.InvalidArgumentError, "MOEC_E_INVALID_ARG",
        lambda p: moec.Router(p.context, moec.RouterDesc(num_experts=4, top_k=5))),
    "an enumerator that does not exist": (
        moec.InvalidArgumentError, "MOEC_E_INVALID_ARG",
        lambda p: moec.Router(p.context, small_router(score=99))),
    "y overlaps x": (
        moec.AliasError, "MOEC_E_ALIAS",
        lambda p: p.layer.forward(p.x, p.weights, p.gate, out=p.x)),
    "a workspace one byte too small": (
        moec.InvalidArgumentError, "MOEC_E_WORKSPACE",
        lambda p: p.layer.forward(p.x, p.weights, p.gate, workspace=np.empty(
            p.layer.sizes.forward_workspace.bytes(T) - 1, np.uint8))),
    "saved one byte too small": (
        moec.InvalidArgumentError, "MOEC_E_WORKSPACE",
        lambda p: p.layer.forward(p.x, p.weights, p.gate, saved=np.empty(
            p.layer.sizes.saved.bytes(T) - 1, np.uint8))),
    "a plan that is not built": (
        moec.StateError, "MOEC_E_INVALID_STATE",
        lambda p: moec.Plan(p.context, plan_desc()).totals()),
    "a corrupt plan": (
        moec.CorruptError, "MOEC_E_CORRUPT",
        lambda p: moec.Plan(p.context, plan_desc()).restore(b"\1" * 4096)),
    "packing what is not frozen": (
        moec.StateError, "MOEC_E_INVALID_STATE", lambda p: p.weights.pack()),
    "more tokens than the plan holds": (
        moec.ShapeError, "MOEC_E_SHAPE",
        lambda p: moec.Plan(p.context, plan_desc()).from_topk(
            np.zeros((T + 1, K), np.int32))),
}


@pytest.mark.parametrize("name", CASES)
def test_refusal(problem: SimpleNamespace, name: str) -> None:
    kind, code, call = CASES[name]
    with pytest.raises(moec.MoecError) as caught:
        call(problem)
    error = caught.value
    assert (error.name, type(error)) == (code, kind)
    assert error.code < 0
    assert error.site.startswith("moec_") and str(error).startswith(error.site)
    assert len(str(error)) < 300


def plan_of(p: SimpleNamespace) -> moec.Plan:
    return moec.Plan(p.context, plan_desc()).from_topk(np.zeros((T, K), np.int32))


def router_of(p: SimpleNamespace) -> moec.Router:
    return moec.Router(p.context, small_router())


NAMED: dict[str, Callable[[SimpleNamespace], object]] = {
    "x is a list; a NumPy array": lambda p: p.layer.forward(p.x.tolist(), p.weights, p.gate),
    "x is None; a NumPy array": lambda p: p.layer.forward(None, p.weights, p.gate),
    "x has dtype complex64; f32": lambda p: p.layer.forward(
        p.x.astype(np.complex64), p.weights, p.gate),
    "x has 0 dimensions; at least 1": lambda p: p.layer.forward(
        np.array(1.0), p.weights, p.gate),
    "gate_weight is a list; a NumPy": lambda p: p.layer.forward(
        p.x, p.weights, p.gate.tolist()),
    "token_mask is a list; a NumPy": lambda p: p.layer.forward(
        p.x, p.weights, p.gate, token_mask=[1] * T),
    "workspace is a str; a NumPy": lambda p: p.layer.forward(
        p.x, p.weights, p.gate, workspace="small"),
    "weights is a dict; a moec.Weights": lambda p: p.layer.forward(p.x, p.arrays, p.gate),
    "d_y is None; a NumPy": lambda p: p.layer.backward(
        p.layer.forward(p.x, p.weights, p.gate), None),
    "result is None; a moec.LayerResult": lambda p: p.layer.backward(None, p.d_y),
    "result is a ndarray; a moec.ExpertsResult": lambda p: moec.Experts(
        p.context, small_experts()).backward(p.x, p.d_y),
    "context is None; a moec.Context": lambda p: moec.Router(None, small_router()),
    "context is a str; a moec.Context": lambda p: moec.Weights.of("cpu", **p.arrays),
    "router is None; a moec.RouterDesc": lambda p: moec.Layer(p.context, None, small_experts()),
    "experts is a RouterDesc; a moec.ExpertsDesc": lambda p: moec.Layer(
        p.context, small_router(), small_router()),
    "desc is None; a moec.PlanDesc": lambda p: moec.Plan(p.context, None),
    "desc is a dict; a moec.EpDesc": lambda p: moec.EP(None, {}),
    "ExpertsDesc.hidden is 3.5; int is needed": lambda p: moec.Experts(
        p.context, replace(small_experts(), hidden=3.5)),
    "ExpertsDesc.inter is 'wide'; int is needed": lambda p: moec.Experts(
        p.context, replace(small_experts(), inter="wide")),
    f"ExpertsDesc.align: {1 << 40} is outside [-2147": lambda p: other_layer(p, align=1 << 40),
    "RouterDesc.scale is None; float is needed": lambda p: moec.Router(
        p.context, small_router(scale=None)),
    "ExpertsDesc.save is 'all'; Save is needed": lambda p: other_layer(p, save="all"),
    "Activation.limit is [7]; float is needed": lambda p: other_layer(
        p, activation=moec.Activation(limit=[7])),
    "ExpertsDesc.activation is 1; Activation is needed": lambda p: other_layer(p, activation=1),
    'device 0; "cpu", "cuda" and "cuda:N"': lambda p: moec.Context(0),
    "stream is a str; None, an address or a stream": lambda p: p.layer.forward(
        p.x, p.weights, p.gate, stream="first"),
    "want is a str; names are needed": lambda p: p.layer.forward(
        p.x, p.weights, p.gate, want="logits"),
    "want has 'logit'; logits, expert_ids": lambda p: p.layer.forward(
        p.x, p.weights, p.gate, want=["logit"]),
    "plan is None; a moec.Plan": lambda p: moec.Experts(p.context, small_experts()).forward(
        None, p.x, p.weights),
    "expert_ids is None; a NumPy": lambda p: moec.Plan(p.context, plan_desc()).from_topk(None),
    "expert_ids has dtype int16; f32": lambda p: moec.Plan(p.context, plan_desc()).from_topk(
        np.zeros((T, K), np.int16)),
    "routing_map is a list; a NumPy": lambda p: moec.Plan(p.context, plan_desc()).from_map([[1]]),
    "scores is a list; a NumPy": lambda p: moec.Plan(p.context, plan_desc()).from_scores([[1.0]]),
    "weight is a list; a NumPy": lambda p: router_of(p).gate(p.x, p.gate.tolist()),
    "logits is a list; a NumPy": lambda p: router_of(p).route(p.x.tolist()),
    "counts is a list; a NumPy": lambda p: router_of(p).update_bias(
        [1] * E, np.zeros(E, np.float32), rate=0.1),
    "rows is a list; a NumPy": lambda p: moec.unpermute(
        p.context, plan_of(p), p.x.tolist(), num_tokens=T),
    "logits is None; a NumPy": lambda p: moec.Loss(kind=moec.LossKind.Z)(p.context, None),
    "d_loss is a float; a NumPy": lambda p: moec.Loss(kind=moec.LossKind.Z).backward(
        p.context, p.x, d_loss=1.0),
    "down[0] is a list; a NumPy": lambda p: moec.Weights.of(
        p.context, gate_up=p.arrays["gate_up"], down=p.arrays["down"].tolist()),
    "down_bias[0] is an int; a NumPy": lambda p: moec.Weights.of(
        p.context, **p.arrays, down_bias=[1]),
    "down is an empty list; an array": lambda p: moec.Weights.of(p.context, down=[]),
    "scheme is GGUF_Q8_0, but no matrix has a Quant": lambda p: moec.Weights.of(
        p.context, scheme=moec.Scheme.GGUF_Q8_0, dtype="f32", **p.arrays),
    "down has dtype float64; f32": lambda p: moec.Weights.of(
        p.context, **{n: a.astype(np.float64) for n, a in p.arrays.items()}),
}


@pytest.mark.parametrize("text", NAMED)
def test_arguments_are_named(problem: SimpleNamespace, text: str) -> None:
    """The argument, what it is, and what is right."""
    with pytest.raises((TypeError, ValueError, OverflowError), match=re.escape(text)):
        NAMED[text](problem)


def test_outputs_are_untouched(problem: SimpleNamespace) -> None:
    y = np.full_like(problem.x, 7)
    with pytest.raises(moec.ShapeError):
        problem.layer.forward(problem.x, problem.weights, problem.gate[:-1].copy(), out=y)
    assert (y == 7).all()


def test_backward_after_inference(problem: SimpleNamespace) -> None:
    layer = other_layer(problem, save=moec.Save.NONE)
    result = layer.forward(problem.x, problem.weights, problem.gate)
    with pytest.raises(moec.MoecError):
        layer.backward(result, problem.d_y)


def test_arguments_before_a_buffer(problem: SimpleNamespace) -> None:
    """The buffer behind one that does not convert was released without having been taken."""
    for tokens in ("8", 8.0, 1 << 70, None) * 20:
        with pytest.raises((TypeError, OverflowError)):
            problem.layer.describe(tokens, problem.weights)


def test_python_kinds() -> None:
    """The exceptions are what Python code expects to catch."""
    assert issubclass(moec.ShapeError, ValueError)
    assert issubclass(moec.DTypeError, TypeError)
    assert issubclass(moec.UnsupportedError, NotImplementedError)
    assert issubclass(moec.OutOfMemoryError, MemoryError)


def test_errors_travel(context: moec.Context) -> None:
    """From a worker process, say: multiprocessing waits for ever where they do not."""
    with pytest.raises(moec.MoecError) as caught:
        moec.Router(context, moec.RouterDesc(num_experts=0, top_k=0))
    error = caught.value
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) is moec.InvalidArgumentError
    assert str(again) == str(error) and vars(again) == vars(error)


def test_unknown_names(problem: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="cpu"):
        moec.Context("gpu")
    with pytest.raises(ValueError, match="logits, expert_ids"):
        problem.layer.forward(problem.x, problem.weights, problem.gate, want=["logit"])
    result = problem.layer.forward(problem.x, problem.weights, problem.gate)
    with pytest.raises(ValueError, match="gate_weight"):
        problem.layer.backward(result, problem.d_y, want=["gate"])


def test_a_device_that_is_absent() -> None:
    if moec.devices(moec.DeviceType.CUDA):
        pytest.skip("this machine has a GPU")
    with pytest.raises(moec.DeviceError) as caught:
        moec.Context("cuda")
    assert caught.value.name == "MOEC_E_NO_BACKEND"
    with pytest.raises(moec.DeviceError):
        moec.load_backend("/nonexistent/libmoec_cuda.so.0")
