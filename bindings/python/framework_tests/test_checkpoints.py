# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as transformers writes them, in the published names (its conversion tables reversed)
and in its own, in one file and sharded: y of `read_layer` beside the block's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_configs import CONFIGS, build
from torch import nn

import moec
from moec.checkpoint import Checkpoint
from moec.families import FAMILIES
from moec.golden import row_error
from moec.model import MoeLayer, read_layer

FP32 = 2e-5  # worst row


def block_of(model: nn.Module) -> tuple[str, nn.Module]:
    """The first MoE block, by what hangs below it."""
    for name, module in model.named_modules():
        below = dict(module.named_children())
        if {"gate", "router"} & below.keys() and {"experts", "input_linear"} & below.keys():
            return name, module
    raise LookupError(type(model).__name__)


def y_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    name, block = block_of(model)
    layer = model.get_submodule(name.rpartition(".")[0])
    if type(block).__name__.startswith("Gemma4"):  # the layer itself
        _, weights, ids = block.router(x)
        return block.experts(x, ids, weights)
    y = block(x[None])
    y = y[0] if isinstance(y, tuple) else y
    return y + layer.shared_mlp(x[None]) if hasattr(layer, "shared_mlp") else y


@pytest.fixture(scope="module")
def context() -> Any:
    with moec.Context(num_threads=1) as made:
        yield made


def test_every_row_is_here() -> None:
    left = {row.model_types[0] for row in FAMILIES if not CONFIGS.keys() & set(row.model_types)}
    assert left == {"bailing_moe", "bailing_moe_v2", "klear"}  # transformers has no class


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("family", CONFIGS)
def test_saved_model(
    context: moec.Context, tmp_path: Path, family: str, published: bool, shards: int
) -> None:
    model = build(family)
    x = torch.randn(17, 32, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        want = y_of(model, x).reshape(x.shape).numpy()
    size = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path, save_original_format=published,
                              max_shard_size=2 * size if shards == 1 else size // shards)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards > 1)
    spec = read_layer(Checkpoint(tmp_path), save=moec.Save.NONE)
    got = MoeLayer(context, spec, frozen=False).forward(x.numpy()).y
    assert row_error(np.asarray(got), want) <= FP32
