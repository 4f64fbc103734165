# SPDX-License-Identifier: Apache-2.0
"""One rank of the tests of expert parallelism."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import moec
import moec.torch
from moec._spec import ROUTED_WEIGHTS

H, I, E, K, T = 16, 24, 7, 2, 12
STEPS = 20


def descs() -> tuple[moec.RouterDesc, moec.ExpertsDesc]:
    router = moec.RouterDesc(num_experts=E, top_k=K, norm=moec.Norm.SUM)
    return router, moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=K,
                                    shared=moec.Shared.ADD, shared_inter=8)


def make_ep(grad_scale: float = 0.0, comm: Any = None) -> moec.torch.EP:
    desc = moec.EpDesc(hidden=H, max_tokens=T, num_experts=E, top_k=K, grad_scale=grad_scale)
    return moec.torch.EP(comm or moec.torch.comm(), desc)


def batch(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """x and target of a rank, in uneven parts of T tokens."""
    generator = torch.Generator().manual_seed(7)
    x, target = torch.randn(2, T, H, generator=generator)
    begin, end = (T * r * r // (size * size) for r in (rank, rank + 1))
    return x[begin:end], target[begin:end]


def initial() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return moec.torch.MoELayer(*descs()).state_dict()


def train(layer: moec.torch.MoELayer, rank: int, size: int, mean: bool) -> list[float]:
    """Losses of STEPS steps. mean: what all ranks hold has the mean of gradients, as DDP makes it,
    and the loss is the mean's part; else their sum."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.3)
    x, target = batch(rank, size)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().sum() / (T * H)
        (loss * size if mean else loss).backward()
        total = loss.detach()
        if size > 1:
            dist.all_reduce(total)
            for name, parameter in layer.named_parameters():
                if parameter.grad is not None and name not in ROUTED_WEIGHTS:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= size if mean else 1
        moec.torch.clip_grad_norm_(layer, 0.05)
        optimizer.step()
        losses.append(float(total))
    return losses


def train_case(rank: int, size: int, folder: Path) -> None:
    for mean in (False, True):
        ep = make_ep(1 / size if mean and size > 1 else 0.0)
        layer = moec.torch.MoELayer(*descs(), ep=ep)
        assert layer.down.shape[0] == len(ep.experts)
        moec.torch.load_full_state_dict(layer, initial())
        losses = train(layer, rank, size, mean)
        state = moec.torch.full_state_dict(layer)
        if rank == 0:
            torch.save((losses, state), folder / f"train_{mean}.pt")


def gradients(run: Any, parameters: list[Tensor], rank: int, size: int) -> list[Tensor]:
    begin, end = T * rank // size, T * (rank + 1) // size
    x, d_y = torch.randn(2, T, H, generator=torch.Generator().manual_seed(5))[:, begin:end]
    logits = torch.randn(T, E, generator=torch.Generator().manual_seed(6))[begin:end]
    weights, ids = logits.softmax(-1).topk(K)
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = run(x, ids, weights)
    return [y.detach(), *torch.autograd.grad(y, [x, weights, *parameters], d_y)]


def experts_desc() -> moec.ExpertsDesc:
    return moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=K)


def full_experts() -> moec.torch.Experts:
    torch.manual_seed(4)
    return moec.torch.Experts(experts_desc(), bias=True)


def experts_case(rank: int, size: int, folder: Path) -> None:
    ep = make_ep()
    experts = moec.torch.Experts(experts_desc(), bias=True, ep=ep)
    moec.torch.load_full_state_dict(experts, full_experts().state_dict())

    def twice(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Two calls of one ep beside each other: the backward of one may come between."""
        return experts(x, ids, weights) + experts(2 * x, ids, weights)

    found = [gradients(run, list(experts.parameters()), rank, size) for run in (experts, twice)]
    torch.save(found, folder / f"experts_{rank}.pt")


def errors_case(rank: int, size: int, folder: Path) -> None:
    comm = moec.torch.comm()
    try:
        desc = moec.EpDesc(hidden=H + rank, max_tokens=T, num_experts=E, top_k=K)
        moec.torch.EP(comm, desc)
    except moec.MismatchError as error:
        assert "desc.hidden" in str(error), error
    else:
        raise AssertionError("no error")
    total = comm.sum(torch.full((3,), rank + 1.0))
    assert total.tolist() == [size * (size + 1) / 2] * 3

    def fails(*_: Any) -> None:
        raise ConnectionError("unplugged")

    alone = moec.Comm(comm.context, 0, 1, fails, fails)
    try:
        alone.sum(torch.ones(1))
    except moec.MoecError as error:
        assert isinstance(error.__cause__, ConnectionError)
    else:
        raise AssertionError("no error")


def edge_data(tokens: list[int], top_k: int) -> tuple[Tensor, ...]:
    """x, d_y, ids, of which some are -1, and weights of all ranks."""
    total = sum(tokens)
    x, d_y = torch.randn(2, total, H, generator=torch.Generator().manual_seed(8))
    logits = torch.randn(total, E, generator=torch.Generator().manual_seed(9))
    weights, ids = logits.softmax(-1).topk(top_k)
    return x, d_y, torch.where(logits[:, :top_k] < -0.8, -1, ids), weights


def outcome(run: Any, module: Any, x: Tensor, d_y: Tensor, *given: Tensor) -> list[Tensor]:
    """y, the gradients of x and of floats that are given, those of parameters."""
    module.zero_grad()
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in (x, *given)]
    y = run(*leaves)
    y.backward(d_y)
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.requires_grad),
            *(p.grad for p in module.parameters())]


def expect_part(ep: moec.torch.EP, tokens: list[int], make: Any, run: Any,
                data: tuple[Tensor, ...]) -> None:
    """A parted module on this rank's tokens is one module on those of all."""
    torch.manual_seed(4)
    one, parted = make(), make(ep=ep)
    begin = sum(tokens[:ep.comm.rank])
    own = slice(begin, begin + tokens[ep.comm.rank])
    moec.torch.load_full_state_dict(parted, one.state_dict())
    got = outcome(lambda *t: run(parted, *t), parted, *(t[own] for t in data))
    want = outcome(lambda *t: run(one, *t), one, *data)
    alone = outcome(lambda *t: run(one, *t), one, *(t[own] for t in data))  # of no other token
    names = [name for name, _ in one.named_parameters()]
    of_rows = len(want) - len(names)
    expected = [t[own] for t in want[:of_rows]]
    expected += [(want[of_rows + i][ep.experts.start:ep.experts.stop] if name in ROUTED_WEIGHTS
                  else alone[of_rows + i]) for i, name in enumerate(names)]
    for have, value in zip(got, expected, strict=True):
        torch.testing.assert_close(have, value, rtol=1e-4, atol=1e-5)


SCHEMES = (moec.EpScheme.GATHER, moec.EpScheme.ROWS, moec.EpScheme.EXACT)


def edges_case(rank: int, size: int, folder: Path) -> None:
    comms = [moec.torch.comm()]
    alone = [dist.new_group([r]) for r in range(size)][rank]
    comms.append(moec.torch.comm(alone))
    try:  # processes have no peers on the CPU
        moec.torch.EP(comms[0], moec.EpDesc(hidden=H, max_tokens=1, num_experts=E, top_k=1,
                                            scheme=moec.EpScheme.PEER))
    except moec.UnsupportedError as error:
        assert "does not reach the memory" in str(error), error
    else:
        raise AssertionError("no error")
    for comm in comms:
        for scheme in SCHEMES:
            for tokens, top_k in (([0, 5], 2), ([1, 0], 1), ([0, 0], 2), ([3, 4], E)):
                parts = tokens[:comm.size] if comm.size > 1 else tokens[1:]
                desc = moec.EpDesc(hidden=H, max_tokens=max(1, *tokens), num_experts=E,
                                   top_k=top_k, scheme=scheme)
                ep = moec.torch.EP(comm, desc, [0, 1, E] if comm.size > 1 else None)
                experts = moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=top_k)
                data = edge_data(parts, top_k)
                expect_part(ep, parts, lambda **o: moec.torch.Experts(experts, bias=True, **o),
                            lambda module, *t: module(*t), data)
                router = moec.RouterDesc(num_experts=E, top_k=top_k, norm=moec.Norm.SUM)
                mask = torch.arange(len(data[0])) % 3 != 1
                expect_part(ep, parts, lambda **o: moec.torch.MoELayer(router, experts, **o),
                            lambda module, x, m: module(x, token_mask=m), (*data[:2], mask))


def order_case(rank: int, size: int, folder: Path) -> None:
    """Calls in another order, two eps of one comm, and what is dropped before its backward."""
    comm = moec.torch.comm()
    for scheme in SCHEMES:
        desc = moec.EpDesc(hidden=H, max_tokens=T, num_experts=E, top_k=K, scheme=scheme)
        eps = [moec.torch.EP(comm, desc) for _ in range(2)]
        parted = [moec.torch.Experts(experts_desc(), bias=True, ep=ep) for ep in eps]
        for module in parted:
            moec.torch.load_full_state_dict(module, full_experts().state_dict())
        x, _, ids, weights = edge_data([4], K)
        for is_sum in (True, False):
            try:
                if rank and is_sum:
                    comm.sum(torch.ones(1))
                else:
                    parted[rank](x, ids, weights)
            except moec.MismatchError as error:
                assert f"rank {1 - rank} " in str(error), error
            else:
                raise AssertionError("no error")
        x.requires_grad_()
        layer = moec.torch.MoELayer(moec.RouterDesc(num_experts=E, top_k=K), experts_desc(),
                                    ep=moec.torch.EP(comm, desc))  # nobody else has it
        torch.nn.init.zeros_(layer.down)
        y = parted[0](parted[1](x, ids, weights), ids, weights) + layer(x)
        one = full_experts()
        also = x.detach().requires_grad_()
        want = one(one(also, ids, weights), ids, weights)
        del eps, parted, module, layer
        gc.collect()
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
        y.sum().backward()
        want.sum().backward()
        torch.testing.assert_close(x.grad, also.grad, rtol=1e-4, atol=1e-5)


CASES = {"train": train_case, "experts": experts_case, "errors": errors_case, "edges": edges_case,
         "order": order_case}


def main(rank: int, size: int, folder: Path, case: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    CASES[case](rank, size, folder)
    dist.barrier()
    dist.destroy_process_group()
