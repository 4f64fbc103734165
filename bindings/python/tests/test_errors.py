# SPDX-License-Identifier: Apache-2.0
"""Every kind of refusal arrives as its exception, in the library's words; outputs are untouched."""

from __future__ import annotations

import pickle
from collections.abc import Callable
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
