# SPDX-License-Identifier: Apache-2.0
"""moec.Comm and moec.EP on NumPy arrays: ranks as threads. Shown to fail: dispatch() leaves the
routing weights out; each rank has the first adapters."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from conftest import assert_close
from test_adapters import GOLDEN, MATRICES, adapter_of

import moec
from moec import EpScheme, golden_codes
from moec.checkpoint import SafetensorsFile

H, I, E, K = 8, 12, 5, 2
TOKENS = (3, 0, 6)


class Board:
    """Collectives of threads: each puts down what it sends, all meet, each takes its part."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.sent: list[Any] = [None] * size

    def comm(self, rank: int) -> moec.Comm:
        size = len(self.sent)

        def exchange(sent: Any, take: Any) -> None:
            self.sent[rank] = sent
            self.barrier.wait()
            take(self.sent)
            self.barrier.wait()

        def all_gather(send: Any, recv: Any) -> None:
            exchange(send, lambda sent: np.copyto(recv, np.stack(sent)))

        def all_to_all(send: Any, recv: Any) -> None:
            exchange(send, lambda sent: np.copyto(recv, np.stack([s[rank] for s in sent])))

        def all_to_all_v(send: Any, sizes: list[int], recv: Any, recv_sizes: list[int]) -> None:
            parts = np.split(send, np.cumsum(sizes)[:-1])
            exchange(parts, lambda sent: np.copyto(recv, np.concatenate([s[rank] for s in sent])))

        context = moec.Context(num_threads=1)
        return moec.Comm(context, rank, size, all_gather, all_to_all, all_to_all_v)


def on_ranks(body: Any, size: int = len(TOKENS)) -> list[Any]:
    """body(comm, rank) of each rank."""
    board = Board(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: body(board.comm(rank), rank), range(size)))


def values(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def ep_desc(**options: Any) -> moec.EpDesc:
    return moec.EpDesc(hidden=H, max_tokens=max(TOKENS), num_experts=E, top_k=K, **options)


@pytest.mark.parametrize("scheme", [EpScheme.GATHER, EpScheme.ROWS, EpScheme.EXACT])
def test_dispatch_and_combine(scheme: EpScheme) -> None:
    """Experts that scale: y = sum of weight * (id + 1) * x."""

    def body(comm: moec.Comm, rank: int) -> None:
        ep = moec.EP(comm, ep_desc(scheme=scheme), [0, 1, 2, E])
        assert ep.scheme == scheme and ep.experts == range(rank, (1, 2, E)[rank])
        x, weights = values(rank, TOKENS[rank], H), values(9 + rank, TOKENS[rank], K)
        ids = np.random.default_rng(rank).integers(0, E, (TOKENS[rank], K), np.int32)
        guests = ep.dispatch(x, ids, weights, x_beside=2 * x)
        assert guests.total_tokens == sum(TOKENS)
        here = guests.ids >= 0
        np.testing.assert_array_equal(guests.beside[here.any(1)], 2 * guests.rows[here.any(1)])
        factor = (np.where(here, guests.weights, 0) * (guests.ids + 1)).sum(1, keepdims=True)
        guests.partial[:] = np.where(here.any(1)[:, None], guests.rows * factor, 0)
        y, d_weights = np.empty_like(x), np.empty_like(weights)
        ep.combine(y, d_guest_weights=guests.ids.astype(np.float32), d_routing_weights=d_weights)
        want = x * (weights * (ids + 1)).sum(1, keepdims=True)
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(d_weights, ids)
        assert ep.state().calls == 2 and ep.state().status == 0 and ep.state().message == ""
        stats = comm.context.stats()
        assert getattr(stats, f"ep_{scheme.name.lower()}") == 2
        assert ep.describe()["expert_begin"] == [0, 1, 2, E]

    on_ranks(body)


def test_a_layer_equals_one_process() -> None:
    router = moec.RouterDesc(num_experts=E, top_k=K, norm=moec.Norm.SUM)
    experts = moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=K, save=moec.Save.ALL)
    gate, gate_up, down = values(1, E, H), values(2, E, 2 * I, H), values(3, E, H, I)
    x, d_y = (values(seed, sum(TOKENS), H) for seed in (4, 5))

    def run(context: moec.Context, own: slice, part: slice, ep: moec.EP | None) -> Any:
        weights_desc = moec.WeightsDesc(num_experts=own.stop - own.start, hidden=H, inter=I)
        weights = moec.Weights(context, weights_desc)
        weights.bind(moec.WeightSet(gate_up=gate_up[own], down=down[own]))
        layer = moec.Layer(context, router, experts, ep=ep)
        result = layer.forward(x[part], weights, gate)
        grads = layer.backward(result, d_y[part])
        return result.y, grads.x, grads.expert_weights.down, grads.gate_weight

    def body(comm: moec.Comm, rank: int) -> Any:
        ep = moec.EP(comm, ep_desc())
        begin = sum(TOKENS[:rank])
        own = slice(ep.experts.start, ep.experts.stop)
        *found, d_gate = run(comm.context, own, slice(begin, begin + TOKENS[rank]), ep)
        return *found, comm.sum(d_gate)

    one = run(moec.Context(num_threads=1), slice(0, E), slice(0, sum(TOKENS)), None)
    ranks = on_ranks(body)
    for index, want in enumerate(one[:3]):
        got = np.concatenate([found[index] for found in ranks])
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    for found in ranks:
        np.testing.assert_allclose(found[3], one[3], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="needs the source tree")
@pytest.mark.parametrize("ends", [(1, 4), (1, 2, 4)])
@pytest.mark.parametrize(("name", "tag"), [
    ("adapters/bf16_two_adapters", "ref_lora_ab"), ("quant/bnb_nf4_stack", "ref_lora"),
    ("quant/mxfp4_gptoss", "ref_lora")])
def test_the_adapters_of_peft_on_ranks(name: str, tag: str, ends: tuple[int, ...]) -> None:
    """Each rank has its experts of the checkpoint's stacks, and of the adapters' factors."""
    file = SafetensorsFile(GOLDEN / f"{name}.safetensors")
    made, size = golden_codes.read(file), len(ends)
    names = json.loads(file.metadata["lora_active"])[tag]
    ids = np.array(file["ids"], np.int32)
    tokens, top_k = ids.shape
    shape = {"hidden": made.hidden, "num_experts": made.count, "top_k": top_k}
    kinds = {"gptoss": moec.ActivationKind.GPTOSS, "swiglu": moec.ActivationKind.SWIGLU}
    kind = kinds[file.metadata["activation"]]

    def body(comm: moec.Comm, rank: int) -> Any:
        ep = moec.EP(comm, moec.EpDesc(max_tokens=tokens, **shape), [0, *ends])
        own, part = ep.experts, slice(rank * tokens // size, (rank + 1) * tokens // size)
        matrices = replace(made, count=len(own), arrays=of_range(made.arrays, own, made.count))
        experts = moec.Experts(comm.context, moec.ExpertsDesc(
            inter=made.inter, expert_begin=own.start, expert_end=own.stop, save=moec.Save.ALL,
            activation=moec.Activation(kind=kind), **shape))
        adapters = moec.Adapters(
            comm.context,
            moec.AdaptersDesc(num_experts=len(own), hidden=made.hidden, inter=made.inter,
                              gate_layout=made.layout.gate_layout),
            [of_range(adapter_of(file, one, made.count), own, made.count) for one in names])
        x, routing = file["x"][part], file["weights"][part]
        guests = ep.dispatch(x, ids[part], routing)
        plan = moec.Plan(comm.context, moec.PlanDesc(
            max_tokens=len(guests.ids), num_experts=made.count, top_k=top_k,
            expert_begin=own.start, expert_end=own.stop))
        plan.from_topk(guests.ids.copy(), guests.weights.copy())
        weights = golden_codes._bound(comm.context, matrices, moec.DType.F32)
        result = experts.forward(plan, guests.rows.copy(), weights, adapters=adapters)
        guests.partial[:] = result.y
        y, d_x, d_routing = (np.empty_like(one) for one in (x, x, routing))
        ep.combine(y)
        guests = ep.dispatch(file["dy"][part], ids[part])
        grads = experts.backward(result, guests.rows.copy(),
                                 want=("x", "routing_weights", "adapters"))
        guests.partial[:] = grads.x
        ep.combine(d_x, d_guest_weights=grads.routing_weights, d_routing_weights=d_routing)
        return y, d_x, d_routing, grads.adapters

    found = on_ranks(body, size)
    for index, key in enumerate(("y", "dx", "dweights")):
        assert_close(np.concatenate([one[index] for one in found]), file[f"{tag}.{key}"], 1e-5)
    for index, adapter in enumerate(names):
        for field, matrix in MATRICES.items():
            parts = [getattr(one[3][index], field) for one in found]
            a, b = (file[f"{tag}.{adapter}.{matrix}.lora_{part}.grad"] for part in "AB")
            wanted = moec.Factors.from_peft(a, b, made.count, 0)
            assert_close(np.concatenate([one.a for one in parts]), wanted.a, 1e-5)
            assert_close(np.concatenate([one.b for one in parts]), wanted.b, 1e-5)


def of_range(value: Any, own: range, count: int) -> Any:
    """What some of the experts have of a stack, and of all that an object holds."""
    if isinstance(value, np.ndarray):
        return np.concatenate(np.split(value, count)[own.start : own.stop])
    if not is_dataclass(value) or isinstance(value, type):
        return value
    stacks = [one.name for one in fields(value) if one.name != "codebook"]
    return replace(value, **{name: of_range(getattr(value, name), own, count) for name in stacks})


def test_errors() -> None:
    def disagrees(comm: moec.Comm, rank: int) -> None:
        with pytest.raises(moec.MismatchError, match="desc.grad_scale"):
            moec.EP(comm, ep_desc(grad_scale=1.0 + rank))

    on_ranks(disagrees)

    def fails(*_: Any) -> None:
        raise ConnectionError("unplugged")

    def late(*_: Any) -> None:
        raise TimeoutError

    context = moec.Context(num_threads=1)
    for callback, cause in ((fails, ConnectionError), (late, TimeoutError)):
        comm = moec.Comm(context, 0, 1, callback, callback)
        with pytest.raises(moec.MoecError) as caught:
            comm.sum(np.ones(1, np.float32))
        assert isinstance(caught.value.__cause__, cause)
        comm.close()
    arrived, ended = threading.Event(), threading.Event()

    def waits(*_: Any) -> None:
        arrived.set()
        if ended.wait(60):
            raise ConnectionAbortedError

    comm = moec.Comm(context, 0, 2, waits, waits, abort=ended.set)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(comm.sum, np.ones(1, np.float32))
        assert arrived.wait(60)
        comm.abort()
        with pytest.raises(moec.MoecError, match="moec_comm_abort was called") as caught:
            call.result()
    assert caught.value.name == "MOEC_E_COMM"
    with pytest.raises(moec.UnsupportedError, match="abort"):
        moec.Comm(context, 0, 1, fails, fails).abort()
    with pytest.raises(ValueError, match="needs 2"):
        moec.EP(moec.Comm(context, 0, 1, fails, fails), ep_desc(), [0, 1, 2])
    with pytest.raises(moec.InvalidArgumentError, match="desc.rank"):
        moec.Comm(context, 2, 2, fails, fails)
    with pytest.raises(moec.UnsupportedError, match="no libnccl"):
        moec.Comm.from_nccl(context, 1, 0, 1)
