# SPDX-License-Identifier: Apache-2.0
"""Models with packed experts on two gloo ranks: DDP and FSDP2, three steps, as on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from models import tokens
from packed_models import experts, load, saved
from peft import LoraConfig, get_peft_model
from ranks import run_ranks
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
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


def with_adapters(place: Path, **options: Any) -> Any:
    """The same on every rank."""
    model = load(place, torch.float32, **options)
    torch.manual_seed(3)
    made = get_peft_model(model, LoraConfig(
        r=4, target_modules=["q_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"]))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1)
    return made


def sharded_rank(index: int, size: int, place: Path) -> None:
    """FSDP2 shards all but packed stacks, which every rank holds."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{place}/meet", rank=index, world_size=size)
    model = with_adapters(place)
    packed = {p for p in model.parameters() if isinstance(p, PackedTensor)}
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=packed)
    fully_shard(model, mesh=mesh, ignored_params=packed)
    names = [n for n, p in model.named_parameters() if isinstance(p, DTensor)]
    assert packed and sum("experts" in name and "lora_" in name for name in names) == 8
    losses = torch.tensor(steps(model, slice(index, index + 1)))
    distributed.all_reduce(losses)
    if index == 0:
        torch.save(losses / 2, place / "losses.pt")
    distributed.destroy_process_group()


def rank(index: int, size: int, place: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{place}/meet", rank=index, world_size=size)
    model = load(place, torch.float32)
    whole: Any = DistributedDataParallel(model)
    losses = torch.tensor(steps(whole, slice(index, index + 1)))
    assert any(isinstance(p, PackedTensor) for p in model.parameters())
    distributed.all_reduce(losses)
    if index == 0:
        torch.save(losses / 2, place / "losses.pt")
    distributed.destroy_process_group()


@pytest.mark.parametrize("way", [rank, sharded_rank])
def test_two_ranks(way: Any, tmp_path: Path) -> None:
    place = saved(tmp_path, "gpt_oss")
    run_ranks(way, 2, place)
    whole = load(place, torch.float32) if way is rank else with_adapters(place)
    want = steps(whole, slice(None))
    got = torch.load(place / "losses.pt").tolist()
    assert got == pytest.approx(want, rel=1e-4) and want[0] > want[2]


@pytest.fixture
def mesh() -> Iterator[Any]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("is_layer", [False, True])
def test_packed_stacks_are_not_sharded_as_values(
    is_layer: bool, mesh: Any, tmp_path: Path
) -> None:
    """fully_shard without ignored_params, and distribute_tensor, say so and leave codes alone."""
    model = load(saved(tmp_path, "gpt_oss"), torch.float32)
    packed = [p for p in model.parameters() if isinstance(p, PackedTensor)]
    with pytest.raises(RuntimeError, match="PackedTensor.* would become a plain DTensor; "
                                           "fully_shard.*ignored_params"):
        fully_shard(model.model.layers[0] if is_layer else model, mesh=mesh)
    with pytest.raises(RuntimeError, match="would become a plain DTensor"):
        distribute_tensor(packed[0], mesh, [Shard(0)])
    assert len(packed) == sum(isinstance(p, PackedTensor) for p in model.parameters())
    values = packed[0].dequantise()
    for got, want in zip(packed[0].chunk(2), values.chunk(2), strict=True):
        assert type(got) is torch.Tensor and torch.equal(got, want)


@pytest.mark.parametrize("is_by_layer", [False, True])
def test_a_device_map(is_by_layer: bool, tmp_path: Path) -> None:
    """As one device, and by layer with accelerate's hooks, as it is where devices differ."""
    model = with_adapters(saved(tmp_path, "qwen3_moe"), device_map={"": "cpu"})
    assert any(isinstance(p, PackedTensor) for p in model.parameters())
    want = steps(model, slice(None))
    assert want[2] < want[0]
    if is_by_layer:
        model = with_adapters(tmp_path / "qwen3_moe")
        parts = ("embed_tokens", "rotary_emb", "layers.0", "layers.1", "norm")
        places = {f"model.{part}": "cpu" for part in parts} | {"lm_head": "cpu"}
        dispatch_model(model.base_model.model, places, main_device="cpu", force_hooks=True)
        assert all(hasattr(module, "_hf_hook") for module in experts(model))
        assert steps(model, slice(None)) == want


def test_offload(tmp_path: Path) -> None:
    """Experts whose codes accelerate moves in for each call; the others' parameters stay."""
    model = load(saved(tmp_path, "qwen3_moe"))
    want = model(tokens()).logits
    for module in experts(model):
        cpu_offload(module, execution_device=torch.device("cpu"))
    for _ in range(2):
        held = [p for module in experts(model) for p in module.parameters()]
        assert all(isinstance(p, nn.Parameter) and p.device.type == "meta" for p in held)
        assert torch.equal(model(tokens()).logits, want)
