# SPDX-License-Identifier: Apache-2.0
"""moec.Comm and moec.EP on NumPy arrays: ranks as threads. Shown to fail: dispatch() leaves the
routing weights out."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import moec
from moec import EpScheme

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


def on_ranks(body: Any) -> list[Any]:
    """body(comm, rank) of each rank."""
    board = Board(len(TOKENS))
    with ThreadPoolExecutor(len(TOKENS)) as pool:
        return list(pool.map(lambda rank: body(board.comm(rank), rank), range(len(TOKENS))))


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
        assert ep.state().calls == 2 and ep.state().status == 0
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
    with pytest.raises(ValueError, match="needs 2"):
        moec.EP(moec.Comm(context, 0, 1, fails, fails), ep_desc(), [0, 1, 2])
    with pytest.raises(moec.InvalidArgumentError, match="desc.rank"):
        moec.Comm(context, 2, 2, fails, fails)
    with pytest.raises(moec.UnsupportedError, match="no libnccl"):
        moec.Comm.from_nccl(context, 1, 0, 1)
