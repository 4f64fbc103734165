# SPDX-License-Identifier: Apache-2.0
"""One rank of the tests of expert parallelism: parallel_worker.py CASE RANK SIZE FOLDER."""

from __future__ import annotations

import sys
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


if __name__ == "__main__":
    case, rank, size, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    {"train": train_case, "experts": experts_case, "errors": errors_case}[case](rank, size, folder)
    dist.barrier()
    dist.destroy_process_group()
