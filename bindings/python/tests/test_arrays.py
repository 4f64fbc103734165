# SPDX-License-Identifier: Apache-2.0
"""Arrays in and out: dtypes, DLPack, layout, memory that must stay alive."""

from __future__ import annotations

import copy
import gc
import importlib.util
import weakref
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import moec
from conftest import E, H, small_experts, small_router


class Producer:
    """A DLPack producer of its own: counts exports, offers no NumPy interface."""

    def __init__(self, array: np.ndarray, *, versioned: bool = True) -> None:
        self.array, self.versioned, self.exports = array, versioned, 0
        self.shape, self.dtype = array.shape, array.dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **request: object) -> object:
        if request.get("max_version") is not None and not self.versioned:
            raise TypeError("unexpected keyword argument 'max_version'")
        self.exports += 1
        return self.array.__dlpack__(**request)


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_is_zero_copy(problem: SimpleNamespace, versioned: bool) -> None:
    expected = problem.layer.forward(problem.x, problem.weights, problem.gate).y
    producer = Producer(problem.x, versioned=versioned)
    out = Producer(np.empty_like(problem.x), versioned=versioned)
    problem.layer.forward(producer, problem.weights, problem.gate, out=out)
    assert producer.exports == 1 and out.exports == 1
    np.testing.assert_array_equal(out.array, expected)


def test_bound_producers_stay_alive(context: moec.Context, problem: SimpleNamespace) -> None:
    """Fails with NaN when Weights.bind keeps neither the arrays nor the capsules (planted once)."""
    expected = problem.layer.forward(problem.x, problem.weights, problem.gate).y
    arrays = {name: array.copy() for name, array in problem.arrays.items()}
    weights = moec.Weights.of(context, **{n: Producer(a) for n, a in arrays.items()})
    del arrays
    gc.collect()
    junk = [np.full_like(a, np.nan) for a in problem.arrays.values() for _ in range(4)]
    got = problem.layer.forward(problem.x, weights, problem.gate).y
    np.testing.assert_array_equal(got, expected)
    assert len(junk) == 8


def test_released_producers_are_let_go(context: moec.Context, problem: SimpleNamespace) -> None:
    class Array(np.ndarray):
        pass

    down = problem.arrays["down"].copy().view(Array)
    seen = weakref.ref(down)
    weights = moec.Weights.of(context, gate_up=problem.arrays["gate_up"], down=down)
    del down
    gc.collect()
    assert seen() is not None
    weights.close()
    del weights
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_types(context: moec.Context, problem: SimpleNamespace, dtype: type) -> None:
    expected = problem.layer.forward(problem.x, problem.weights, problem.gate).y
    code = moec.dtype_of(dtype)
    layer = moec.Layer(context, small_router(data_dtype=code), small_experts(dtype=code))
    narrow = {name: array.astype(dtype) for name, array in problem.arrays.items()}
    weights = moec.Weights.of(context, **narrow)
    result = layer.forward(problem.x.astype(dtype), weights, problem.gate)
    assert result.y.dtype == dtype
    # Rounded inputs may route a token elsewhere; most rows must agree closely.
    diff = np.linalg.norm(result.y.astype(np.float32) - expected, axis=1)
    assert np.median(diff / np.linalg.norm(expected, axis=1)) < 2e-2
    grads = layer.backward(result, problem.d_y.astype(dtype), grad_dtype="f32")
    assert grads.x.dtype == dtype
    assert grads.expert_weights.down.dtype == np.float32
    assert np.isfinite(grads.expert_weights.gate_up).all()


def test_per_expert_arrays(context: moec.Context, problem: SimpleNamespace) -> None:
    expected = problem.layer.forward(problem.x, problem.weights, problem.gate)
    wanted = problem.layer.backward(expected, problem.d_y)
    split = {name: [a.copy() for a in array] for name, array in problem.arrays.items()}
    weights = moec.Weights.of(context, **split)
    result = problem.layer.forward(problem.x, weights, problem.gate)
    np.testing.assert_array_equal(result.y, expected.y)
    grads = problem.layer.backward(result, problem.d_y)
    assert isinstance(grads.expert_weights.down, list)
    np.testing.assert_array_equal(np.stack(grads.expert_weights.down), wanted.expert_weights.down)


def test_strides_are_refused(problem: SimpleNamespace) -> None:
    wide = np.zeros((len(problem.x), 2 * H), np.float32)
    with pytest.raises(moec.LayoutError):
        problem.layer.forward(wide[:, ::2], problem.weights, problem.gate)
    one = np.broadcast_to(np.float32(0.5), problem.x.shape)
    with pytest.raises(moec.LayoutError, match="stride 0"):
        problem.layer.forward(one, problem.weights, problem.gate)
    packed = np.zeros(problem.x.size, [("value", np.float32), ("tag", np.int16)])
    with pytest.raises(BufferError, match="stride of 6 bytes"):
        moec.Plan.from_topk(np.zeros((8, 1), np.int32), packed["value"][:8, None])


@pytest.mark.parametrize("step", [2, -1])
def test_strides_of_memory_are_refused(problem: SimpleNamespace, step: int) -> None:
    """saved, workspace and a plan's memory are bytes in a row: nothing between or behind them."""
    p = problem
    need = max(p.layer.sizes.saved.bytes(len(p.x)), p.layer.sizes.forward_workspace.bytes(len(p.x)))
    whole = np.full(4 * need, 7, np.uint8)
    part = whole[:2 * need][::step]
    for name in ("saved", "workspace"):
        with pytest.raises(moec.LayoutError):
            p.layer.forward(p.x, p.weights, p.gate, **{name: part})
    desc = moec.PlanDesc(max_tokens=4, num_experts=E, top_k=2)
    room = np.full(4 * moec.plan_size(desc)[0], 7, np.uint8)
    with pytest.raises(moec.LayoutError):
        moec.Plan(p.context, desc, memory=room[: len(room) // 2][::step])
    assert (whole == 7).all() and (room == 7).all()
    p.layer.forward(p.x, p.weights, p.gate, saved=whole[:need], workspace=whole[2 * need :])


def test_lists_of_unequal_length_are_refused(context: moec.Context) -> None:
    """One count says how many tensors the library may read of both."""
    down = [np.zeros((H, 4), np.float32)] * 3
    bias = [np.zeros(H, np.float32)] * 8
    desc = moec.WeightsDesc(num_experts=8, hidden=H, inter=4, gate_layout=moec.GateLayout.NONE)
    with pytest.raises(ValueError, match="down has 3 arrays, down_bias 8"):
        moec.Weights(context, desc).bind(moec.WeightSet(down=down, down_bias=bias))
    loss = moec.Loss(kind=moec.LossKind.BALANCE_MIXTRAL, top_k=2)
    logits, out = ([np.zeros((5, E), np.float32) for _ in range(n)] for n in (3, 1))
    with pytest.raises(ValueError, match="out has 1 arrays, logits 3"):
        loss.backward(context, logits, out=out)


def test_read_only_outputs_are_refused(problem: SimpleNamespace) -> None:
    y = np.empty_like(problem.x)
    y.flags.writeable = False
    with pytest.raises(BufferError, match="read-only"):
        problem.layer.forward(problem.x, problem.weights, problem.gate, out=y)


def test_what_is_no_array(problem: SimpleNamespace) -> None:
    with pytest.raises(TypeError, match="gate_weight is a list; a NumPy array"):
        problem.layer.forward(problem.x, problem.weights, problem.gate.tolist())
    with pytest.raises(TypeError, match="complex64"):
        problem.layer.forward(problem.x, problem.weights, problem.gate.astype(np.complex64))


def test_no_tokens(problem: SimpleNamespace) -> None:
    result = problem.layer.forward(problem.x[:0], problem.weights, problem.gate)
    grads = problem.layer.backward(result, problem.d_y[:0])
    assert result.y.shape == (0, H) and grads.x.shape == (0, H)
    assert not grads.gate_weight.any() and grads.gate_weight.shape == (E, H)


def test_dtype_names() -> None:
    for name in ("bf16", "bfloat16", ml_dtypes.bfloat16, moec.DType.BF16):
        assert moec.dtype_of(name) is moec.DType.BF16
    assert moec.numpy_dtype("f32") == np.float32
    with pytest.raises(TypeError, match="bf16"):
        moec.dtype_of("bf61")


if importlib.util.find_spec("torch"):

    def test_torch_tensors(problem: SimpleNamespace) -> None:
        import torch

        expected = problem.layer.forward(problem.x, problem.weights, problem.gate)
        wanted = problem.layer.backward(expected, problem.d_y)
        x = torch.from_numpy(problem.x).requires_grad_()
        weights = moec.Weights.of(
            problem.context, **{k: torch.from_numpy(v) for k, v in problem.arrays.items()})
        result = problem.layer.forward(x, weights, torch.from_numpy(problem.gate))
        grads = problem.layer.backward(result, torch.from_numpy(problem.d_y))
        assert isinstance(result.y, torch.Tensor) and isinstance(grads.x, torch.Tensor)
        np.testing.assert_array_equal(result.y.numpy(), expected.y)
        np.testing.assert_array_equal(grads.expert_weights.down.numpy(), wanted.expert_weights.down)

    def test_torch_bfloat16(problem: SimpleNamespace) -> None:
        import torch

        layer = moec.Layer(problem.context, small_router(), small_experts(dtype="bf16"))
        narrow = {k: torch.from_numpy(v).bfloat16() for k, v in problem.arrays.items()}
        weights = moec.Weights.of(problem.context, **narrow)
        x = torch.from_numpy(problem.x).bfloat16()
        result = layer.forward(x, weights, torch.from_numpy(problem.gate))
        numpy_weights = moec.Weights.of(problem.context, **{
            k: v.astype(ml_dtypes.bfloat16) for k, v in problem.arrays.items()})
        y = layer.forward(problem.x.astype(ml_dtypes.bfloat16), numpy_weights, problem.gate).y
        assert result.y.dtype == torch.bfloat16
        np.testing.assert_array_equal(result.y.float().numpy(), y.astype(np.float32))


def test_device_arrays_serve_every_call(problem: SimpleNamespace) -> None:
    """On the CPU the same code that needs nothing but NumPy on a GPU."""
    context = problem.context
    want = problem.layer.forward(problem.x, problem.weights, problem.gate)
    wanted = problem.layer.backward(want, problem.d_y)
    x, gate, d_y = (context.array(a) for a in (problem.x, problem.gate, problem.d_y))
    weights = moec.Weights.of(context, **{n: context.array(a) for n, a in problem.arrays.items()})
    result = problem.layer.forward(x, weights, gate)
    assert isinstance(result.y, moec.DeviceArray) and result.y.shape == problem.x.shape
    np.testing.assert_array_equal(result.y.numpy(), want.y)
    grads = problem.layer.backward(result, d_y)
    np.testing.assert_array_equal(grads.x.numpy(), wanted.x)
    np.testing.assert_array_equal(grads.expert_weights.down.numpy(), wanted.expert_weights.down)


def test_device_arrays_copy_and_close(context: moec.Context) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    with context.array(values) as array:
        assert (array.shape, array.ndim, array.nbytes) == ((3, 4), 2, 48)
        values[:] = 0
        assert array.numpy().sum() == 66
        assert not array.zero().numpy().any()
        with pytest.raises(moec.ShapeError, match=r"\[3,4\]"):
            array.copy_from(values[:2])
        with pytest.raises(moec.DTypeError):
            array.copy_from(values.astype(np.int32))
        with pytest.raises(TypeError, match="copied"):
            copy.copy(array)
        assert not hasattr(array, "__cuda_array_interface__")
    with pytest.raises(moec.StateError, match="closed"):
        array.numpy()
    array.close()
    assert not context.zeros((5,), "bf16").numpy().any()
    assert context.empty((0, 3)).numpy().shape == (0, 3)
    with pytest.raises(moec.OutOfMemoryError):
        context.empty((1 << 40, 1 << 20), "u8")


def test_device_arrays_outlive_their_context(problem: SimpleNamespace) -> None:
    context = moec.Context()
    array = context.array(problem.x)
    context.close()
    with pytest.raises(moec.StateError, match="closed"):
        array.numpy()
    array.close()
