# SPDX-License-Identifier: Apache-2.0
"""Models with packed experts on two gloo ranks: DDP and FSDP2, three steps, as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as processes
from models import tokens
from packed_models import load, saved
from peft import LoraConfig, get_peft_model
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moec.torch._packed import PackedTensor


def steps(model: nn.Module, rows: slice) -> list[float]:
    """The losses of three steps; of a rank's rows."""
    optimiser = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.05)
    losses = []
    for _ in range(3):
        optimiser.zero_grad()
        ids = tokens()[rows]
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        losses.append(float(loss))
    return losses


def with_adapters(place: Path) -> Any:
    """The same on every rank."""
    model = load(place, torch.float32)
    torch.manual_seed(3)
    made = get_peft_model(model, LoraConfig(
        r=4, target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"]))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1)
    return made


def sharded_rank(index: int, place: str) -> None:
    """FSDP2 shards all but packed stacks, which every rank holds."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{place}/meet", rank=index, world_size=2)
    model = with_adapters(Path(place))
    packed = {p for p in model.parameters() if isinstance(p, PackedTensor)}
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=packed)
    fully_shard(model, mesh=mesh, ignored_params=packed)
    names = [n for n, p in model.named_parameters() if isinstance(p, DTensor)]
    assert packed and sum("experts" in name and "lora_" in name for name in names) == 8
    losses = torch.tensor(steps(model, slice(index, index + 1)))
    distributed.all_reduce(losses)
    if index == 0:
        torch.save(losses / 2, Path(place) / "losses.pt")
    distributed.destroy_process_group()


def rank(index: int, place: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{place}/meet", rank=index, world_size=2)
    model = load(Path(place), torch.float32)
    whole: Any = DistributedDataParallel(model)
    losses = torch.tensor(steps(whole, slice(index, index + 1)))
    assert any(isinstance(p, PackedTensor) for p in model.parameters())
    distributed.all_reduce(losses)
    if index == 0:
        torch.save(losses / 2, Path(place) / "losses.pt")
    distributed.destroy_process_group()


@pytest.mark.parametrize("way", [rank, sharded_rank])
def test_two_ranks(way: Any, tmp_path: Path) -> None:
    place = saved(tmp_path, "gpt_oss")
    processes.spawn(way, (str(place),), nprocs=2)
    whole = load(place, torch.float32) if way is rank else with_adapters(place)
    want = steps(whole, slice(None))
    got = torch.load(place / "losses.pt").tolist()
    assert got == pytest.approx(want, rel=1e-4) and want[0] > want[2]


def test_a_device_map(tmp_path: Path) -> None:
    model = load(saved(tmp_path, "qwen3_moe"), torch.float32, device_map={"": "cpu"})
    assert any(isinstance(p, PackedTensor) for p in model.parameters())
    losses = steps(model, slice(None))
    assert losses[2] < losses[0]
