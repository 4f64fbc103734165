# SPDX-License-Identifier: Apache-2.0
"""Lifetimes, threads and the GIL."""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

import moec
from conftest import E, small_experts, small_router


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_any_order_of_closing(problem: SimpleNamespace, order: tuple[int, ...]) -> None:
    context = moec.Context(num_threads=1)
    layer = moec.Layer(context, small_router(), small_experts())
    weights = moec.Weights.of(context, **problem.arrays)
    y = layer.forward(problem.x, weights, problem.gate).y
    objects = [context, layer, weights]
    for index in order:
        objects[index].close()
        objects[index].close()  # twice is once
    assert np.isfinite(y).all()


def test_children_outlive_their_context(problem: SimpleNamespace) -> None:
    context = moec.Context(num_threads=1)
    layer = moec.Layer(context, small_router(), small_experts())
    weights = moec.Weights.of(context, **problem.arrays)
    expected = layer.forward(problem.x, weights, problem.gate).y
    context.close()
    del context
    gc.collect()
    got = layer.forward(problem.x, weights, problem.gate)
    np.testing.assert_array_equal(got.y, expected)
    layer.backward(got, problem.d_y)


def test_closed_objects_raise(problem: SimpleNamespace) -> None:
    with moec.Context(num_threads=1) as context:
        router = moec.Router(context, small_router())
    with pytest.raises(moec.StateError, match="Context: already closed"):
        context.stats()
    router.close()
    with pytest.raises(moec.StateError, match="Router: already closed"):
        router.gate(problem.x, problem.gate)


FIRST = ["moec.set_log(lambda *_: None, 0)", "moec._raw.hook = lambda: None"]


@pytest.mark.parametrize("first", FIRST)
def test_objects_alive_at_exit_are_quiet(first: str) -> None:
    """Whatever the interpreter tears down first, nothing is printed and nothing crashes. The second
    keeps main alive longer than the Python half of the low-level layer; it failed once."""
    code = """if True:
        import moec, numpy as np
        FIRST
        context = moec.Context(num_threads=2)
        weights = moec.Weights.of(context, gate_up=np.zeros((2, 8, 4), "f"),
                                  down=np.zeros((2, 4, 4), "f"))
        layer = moec.Layer(context, moec.RouterDesc(num_experts=2, top_k=1),
                           moec.ExpertsDesc(hidden=4, inter=4, num_experts=2, top_k=1))
        result = layer.forward(np.ones((3, 4), "f"), weights, np.ones((2, 4), "f"))
        cycle = [context]; cycle.append(cycle)
    """
    code = code.replace("FIRST", first)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_handles_are_not_copied(problem: SimpleNamespace) -> None:
    """A copy would free the same handle again, or another's that lies there by then."""
    plan = moec.Plan(problem.context, moec.PlanDesc(max_tokens=4, num_experts=E, top_k=2))
    for handle in (problem.context, problem.layer, problem.weights, plan):
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=f"a {type(handle).__name__} owns a handle"):
                make(handle)
    gc.collect()
    plan.from_topk(np.zeros((4, 2), np.int32))
    assert plan.totals().rows == 8


def test_failed_construction_leaves_nothing_behind(context: moec.Context) -> None:
    with pytest.raises(moec.MoecError):
        moec.Router(context, moec.RouterDesc(num_experts=0, top_k=0))
    gc.collect()  # __del__ of the half-made object must not raise


def test_results_keep_what_backward_needs(problem: SimpleNamespace) -> None:
    p = problem
    expected = p.layer.backward(p.layer.forward(p.x, p.weights, p.gate), p.d_y)
    weights = moec.Weights.of(p.context, **{k: v.copy() for k, v in p.arrays.items()})
    result = p.layer.forward(p.x.copy(), weights, p.gate.copy())
    del weights
    gc.collect()
    grads = p.layer.backward(result, p.d_y)
    np.testing.assert_array_equal(grads.gate_weight, expected.gate_weight)


def test_the_gil_is_released(context: moec.Context, rng: np.random.Generator) -> None:
    """Another thread notes the time while one long call runs: its notes lie all along the call.
    Without `%thread moec_layer_forward` in moec.i they lie at its ends only (2 of 20 parts)."""
    tokens, hidden, inter = 4096, 256, 512
    layer = moec.Layer(context, small_router(), moec.ExpertsDesc(
        hidden=hidden, inter=inter, num_experts=E, top_k=2))
    weights = moec.Weights.of(
        context, gate_up=rng.standard_normal((E, 2 * inter, hidden), np.float32),
        down=rng.standard_normal((E, hidden, inter), np.float32))
    x = rng.standard_normal((tokens, hidden), np.float32)
    gate = rng.standard_normal((E, hidden), np.float32)
    y = layer.forward(x, weights, gate).y
    stop, notes = threading.Event(), []

    def note() -> None:
        while not stop.wait(0.0005):
            notes.append(time.perf_counter())

    worker = threading.Thread(target=note)
    worker.start()
    begin = time.perf_counter()
    layer.forward(x, weights, gate, out=y)
    end = time.perf_counter()
    stop.set()
    worker.join()
    parts = {int(20 * (at - begin) / (end - begin)) for at in notes if begin <= at < end}
    assert len(parts) >= 6, (parts, end - begin)


def test_one_layer_in_many_threads(problem: SimpleNamespace) -> None:
    p = problem
    expected = p.layer.forward(p.x, p.weights, p.gate).y

    def work(_: int) -> bool:
        return bool((p.layer.forward(p.x, p.weights, p.gate).y == expected).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))


def test_openmps_threads_or_our_own(problem: SimpleNamespace) -> None:
    """The bits are the same on the threads of an OpenMP runtime, if this process has one."""
    with moec.Context(num_threads=3, openmp=True) as context:
        layer = moec.Layer(context, small_router(), small_experts())
        got = layer.forward(problem.x, moec.Weights.of(context, **problem.arrays), problem.gate)
    want = problem.layer.forward(problem.x, problem.weights, problem.gate)
    assert np.array_equal(got.y, want.y)


def test_errors_stay_in_their_thread(problem: SimpleNamespace) -> None:
    p = problem

    def work(index: int) -> str:
        if index % 2:
            return str(np.isfinite(p.layer.forward(p.x, p.weights, p.gate).y).all())
        with pytest.raises(moec.MoecError) as caught:
            p.layer.forward(p.x[:, :-1].copy(), p.weights, p.gate)
        return caught.value.name

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(work, range(64)))
    assert set(answers[0::2]) == {"MOEC_E_SHAPE"} and set(answers[1::2]) == {"True"}


def test_steady_state_allocates_nothing(problem: SimpleNamespace) -> None:
    p = problem
    context = moec.Context(num_threads=2)
    layer = moec.Layer(context, small_router(), small_experts())
    weights = moec.Weights.of(context, **p.arrays)
    result = layer.forward(p.x, weights, p.gate)
    grads = layer.backward(result, p.d_y)
    before = context.stats()
    for _ in range(5):
        again = layer.forward(p.x, weights, p.gate, out=result.y, saved=result.saved)
        layer.backward(again, p.d_y, into=grads)
    after = context.stats()
    assert after.allocs == before.allocs and after.host_syncs == before.host_syncs
    assert after.calls > before.calls and after.flops > before.flops
    assert after.path_cpu - before.path_cpu == 10 and after.path_fallbacks == after.ep_exact == 0
    context.reset_stats()
    assert context.stats().calls == 0
    context.reserve(1 << 20).trim()
    context.sync()
    assert context.poll() == 0


class Mallinfo(ctypes.Structure):  # mallinfo2
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost")]


def test_calls_leave_no_memory_behind(problem: SimpleNamespace) -> None:
    """Structs that another one points to are Python's still: SWIG gives them away."""
    p = problem
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("not glibc, or an old one")
    libc.mallinfo2.restype = Mallinfo

    def step() -> None:
        p.layer.backward(p.layer.forward(p.x, p.weights, p.gate), p.d_y)
        moec.Layer(p.context, small_router(), small_experts()).close()

    def used() -> int:
        gc.collect()
        return libc.mallinfo2().uordblks

    for _ in range(20):
        step()
    before = used()
    for _ in range(200):
        step()
    assert used() - before < 200 * 100  # bytes; 4 KB a step before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_log(problem: SimpleNamespace) -> None:
    """Messages reach the sink, and a sink that raises harms nobody."""
    seen: list[tuple[int, str]] = []

    def sink(level: int, message: str) -> None:
        seen.append((level, message))
        raise RuntimeError("from the sink")

    moec.set_log(sink, moec.LogLevel.TRACE)
    try:
        with moec.Context(num_threads=2) as context:
            layer = moec.Layer(context, small_router(), small_experts())
            layer.forward(problem.x, moec.Weights.of(context, **problem.arrays), problem.gate)
    finally:
        moec.set_log(None)
    assert seen and all(isinstance(level, int) and message for level, message in seen)


def test_a_log_that_is_refused_leaves_the_old_one() -> None:
    seen: list[str] = []
    moec.set_log(lambda level, message: seen.append(message), moec.LogLevel.TRACE)
    try:
        with pytest.raises(moec.InvalidArgumentError):
            moec.set_log(lambda level, message: None, 99)
        with pytest.raises(TypeError, match="3 cannot be called"):
            moec.set_log(3)
        moec.Context(num_threads=1).close()
    finally:
        moec.set_log(None)
    assert seen
