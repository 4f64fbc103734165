# SPDX-License-Identifier: Apache-2.0
"""Tiny models whose experts bitsandbytes quantises on load, in sizes that its kernels for CPUs with
AVX-512 dequantise right: last dimensions are multiples of the block of 64."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from models import HERE, build, tokens
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, logging

from moec.torch._packed import PackedTensor

logging.disable_progress_bar()
if find_spec("bitsandbytes"):
    import bitsandbytes

    # Where the CPU has bf16 instructions, a linear layer in 4 bits whose input needs no gradient
    # turns its weight for them, and rounds to bf16 whatever type it is to compute in.
    bitsandbytes.nn.modules.has_avx512bf16 = lambda: False
SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
STACKS = ("gate_up_proj", "down_proj")


WIDE = {name: size if name == "head_dim" else 128 for name, size in SIZES.items()}


def saved(
    folder: Path, family: str, dtype: torch.dtype = torch.bfloat16,
    sizes: dict[str, int] = SIZES,
) -> Path:
    """A plain checkpoint of a family."""
    place = folder / family
    build(family, sizes=sizes).to(dtype).save_pretrained(place)
    return place


def draw_mxfp4(folder: Path) -> Path:
    """Codes and scales in the place of the experts of a saved gpt-oss."""
    generator = torch.Generator().manual_seed(2)
    found = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if not name.endswith(STACKS):
            found[name] = value
            continue
        count, inputs, outputs = value.shape
        shape = (count, outputs, inputs // 32)
        found[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator,
                                                dtype=torch.uint8)
        found[f"{name}_scales"] = torch.randint(122, 126, shape, generator=generator,
                                                dtype=torch.uint8)
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    file.write_text(json.dumps(config))
    return folder


def load(
    place: Path, dtype: torch.dtype = torch.bfloat16, device_map: Any = HERE, **options: Any
) -> Any:
    """It in 4 bits, as a user loads it."""
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype,
        **({"bnb_4bit_use_double_quant": True} | options),
    )
    return AutoModelForCausalLM.from_pretrained(
        place, quantization_config=config, dtype=dtype, device_map=device_map)


def experts(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "_apply_gate")]


def train(model: Any, rate: float) -> list[float]:
    """The losses of three steps of what is trained."""
    optimiser = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=rate)
    ids = tokens(device=model.device.type)
    losses = []
    for _ in range(3):
        optimiser.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        losses.append(float(loss))
    return losses


def dense_twin(
    model: Any, place: Path, dtype: torch.dtype = torch.bfloat16, device_map: Any = None,
    **options: Any
) -> Any:
    """The same model with the packed values in plain experts, on transformers' eager code."""
    twin = load(place, dtype, device_map, llm_int8_skip_modules=["experts", "lm_head"], **options)
    for packed, plain in zip(experts(model), experts(twin), strict=True):
        for name in STACKS:
            held = getattr(packed, name)
            assert isinstance(held, PackedTensor)
            getattr(plain, name).data = held.dequantise()
    twin.config._experts_implementation_internal = "eager"
    return twin
