# SPDX-License-Identifier: Apache-2.0
"""One rank of a Qwen3-MoE under transformers' expert parallelism."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import moec.transformers
from moec import EpDesc, EpScheme
from moec.transformers import _parallel

STEPS, RATE = 5, 0.2
EXPERTS = SEQUENCES = 8  # ranks divide both


def tokens(rank: int, size: int) -> Tensor:
    """The sequences of a rank, of 7 tokens each."""
    every = torch.randint(0, 64, (SEQUENCES, 7), generator=torch.Generator().manual_seed(2))
    return every[SEQUENCES * rank // size : SEQUENCES * (rank + 1) // size]


def train(model: Any, ids: Tensor, size: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        if size > 1:
            dist.all_reduce(total)
        losses.append(float(total) / size)
    return losses


def main(rank: int, size: int, folder: Path, kind: str, scheme: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    _parallel.EpDesc = partial(EpDesc, scheme=EpScheme[scheme])  # type: ignore[misc, assignment]
    config = DistributedConfig(ep_size=size, fsdp_size=size, ep_implementation="moec")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", distributed_config=config)
    experts = model.model.layers[0].mlp.experts
    held = experts.down_proj
    local = held.to_local() if hasattr(held, "to_local") else held
    assert local.shape[0] == EXPERTS // size, local.shape
    waits: list[int] = []
    ask = _parallel.MoecEP._largest

    def counted(*given: Any) -> int:
        waits.append(ask(*given))
        return waits[-1]

    _parallel.MoecEP._largest = counted  # type: ignore[method-assign]
    own = tokens(rank, size).to(device)
    losses = train(model, own, size)
    model.save_pretrained(folder / "trained")
    each = own.numel()
    assert waits == [each] * STEPS, waits  # one a forward, of all layers
    model.gradient_checkpointing_enable()
    model.train()
    longer = own.repeat(1, 2)
    # What waits for its backward has the bound of its own forward, which GATHER's rows follow.
    both = [model(input_ids=ids, labels=ids).loss for ids in (longer, own)]
    sum(both).backward()  # which calls the layers once more
    assert waits[STEPS:] == [2 * each, each], waits
    with torch.no_grad():
        model(input_ids=longer)
    assert len(waits) == STEPS + 3, waits
    if rank == 0:
        torch.save(losses, folder / "losses.pt")
    dist.barrier()
    dist.destroy_process_group()
