# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of models with packed experts: in the keys of the library whose codes they are, and
as plain values for everyone."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from ..torch._packed import PackedTensor
from ._packed import stored

_LAYER = re.compile(r".*?\.\d+\.")


def packed_of(model: nn.Module) -> dict[str, PackedTensor]:
    """A model's packed parameters by name."""
    return {name: value for name, value in model.named_parameters()
            if isinstance(value, PackedTensor)}


def published_state(model: Any, state: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
    """A state_dict in which a packed stack is its published tensors; None if there is none packed.

    transformers saves by reversing the conversions of its load: those that made the stacks are
    left out, since codes cannot be split into a checkpoint's matrices."""
    packed = packed_of(model)
    if not packed:
        return state
    found: dict[str, Tensor] = {}
    for name, value in (model.state_dict() if state is None else state).items():
        if isinstance(value, PackedTensor):
            found |= _published(name, value)
        else:
            found[name] = value
    stacks = {name.rpartition(".")[2] for name in packed}
    conversions = getattr(model, "_weight_conversions", None) or []
    model._weight_conversions = [
        one for one in conversions if _reverses(one) and not stacks & {
            target.rpartition(".")[2] for target in one.target_patterns}
    ]
    return found


def _published(name: str, value: PackedTensor) -> dict[str, Tensor]:
    """The tensors of a stack by a checkpoint's keys; of single experts' matrices one an expert."""
    if value.store.names == ("",):
        return {name + suffix: part for suffix, part in value.parts.items()}
    path = name.rpartition(".")[0]
    return {f"{path}.{expert}.{suffix}": one.clone() for suffix, part in value.parts.items()
            for expert, one in enumerate(part)}


def _reverses(conversion: Any) -> bool:
    """Whether a conversion can be reversed: bitsandbytes' of linear layers cannot, whose keys in a
    state_dict are those of the file."""
    try:
        conversion.reverse_transform()
    except NotImplementedError:
        return False
    return True


def save_merged(
    model: Any, folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Write a checkpoint of plain values in `dtype`, that transformers loads without moec: packed
    experts and bitsandbytes' 4-bit linear layers dequantised, PEFT's active adapters merged in.
    The model stays as it is. One layer at a time is made, on the model's devices.

    Raises NotImplementedError, naming it, for a parameter that has another store or an adapter
    that is not a sum with the weight."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    values, strict = _Values(base, dtype), getattr(base, "_weight_conversions", None)
    shards = _Shards(target, max_shard_bytes)
    base._weight_conversions = None  # those of a model that was not loaded: of the family
    try:
        for names in _by_layer(values.names):
            made = revert_weight_conversion(base, {name: values.make(name) for name in names})
            shards.add({name: t.detach().cpu().contiguous() for name, t in made.items()})
    finally:
        base._weight_conversions = strict
    shards.close()
    config = copy.deepcopy(base.config)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    config.dtype = dtype
    config.architectures = [type(base).__name__]
    config.save_pretrained(target)
    if base.can_generate():
        base.generation_config.save_pretrained(target)


def _by_layer(names: Iterable[str]) -> list[list[str]]:
    """Names in groups of a layer, which a conversion needs together; the others alone."""
    groups: dict[str, list[str]] = {}
    for name in names:
        match = _LAYER.match(name)
        groups.setdefault(match[0] if match else name, []).append(name)
    return list(groups.values())


class _Values:
    """The plain values of a model's parameters and buffers, by the names of one without PEFT."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.dtype = dtype
        kept = (*(model._keep_in_fp32_modules or ()),
                *(getattr(model, "_keep_in_fp32_modules_strict", None) or ()))
        self._kept = tuple(str(name) for name in kept)
        self._held: dict[str, tuple[nn.Module, str]] = {}
        self._layers: dict[str, list[Any]] = {}
        persistent, seen = model.state_dict().keys(), set[int]()
        for path, module in model.named_modules():
            if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
                raise NotImplementedError(
                    f"moec.transformers: {path} is trained whole (PEFT's modules_to_save); "
                    "save_merged() merges adapters"
                )
            if hasattr(module, "get_delta_weight"):
                leaf = getattr(module, "parameter_name", "weight")
                self._layers.setdefault(_plain_name(f"{path}.{leaf}"), []).append(module)
            own = [*module._parameters.items(), *module._buffers.items()]
            for leaf, value in own:
                name = f"{path}.{leaf}" if path else leaf
                if value is None or id(value) in seen or _is_of_peft(name):
                    continue
                if leaf in module._buffers and name not in persistent:
                    continue
                seen.add(id(value))
                self._held[_plain_name(name)] = module, leaf
            for leaf in getattr(module, "parametrizations", ()):
                self._held[_plain_name(f"{path}.{leaf}")] = module, leaf
        self._held = {name: at for name, at in self._held.items()
                      if ".parametrizations." not in name}

    @property
    def names(self) -> list[str]:
        return list(self._held)

    def make(self, name: str) -> Tensor:
        module, leaf = self._held[name]
        value = stored(module, leaf)
        assert value is not None
        if isinstance(value, PackedTensor):
            value = value.dequantise()
        elif (state := getattr(value, "quant_state", None)) is not None:
            stack = copy.copy(state)
            stack.shape = torch.Size((1, *state.shape))
            value = PackedTensor.from_bnb(value.detach(), stack).dequantise(0)
        elif not value.is_floating_point() and leaf in module._parameters:
            raise NotImplementedError(
                f"moec.transformers: {name} is of {value.dtype} in a {type(module).__name__}; "
                "save_merged() knows moec's packed experts and bitsandbytes' 4-bit layers"
            )
        elif leaf in module._buffers:
            return value
        for layer in self._layers.get(name, ()):
            for adapter in () if layer.merged or layer.disable_adapters else layer.active_adapters:
                if adapter in (*layer.lora_A, *layer.lora_embedding_A):
                    if getattr(layer, "use_dora", {}).get(adapter):
                        raise NotImplementedError(
                            f"moec.transformers: {name}: DoRA is not a sum with the weight")
                    value = value + layer.get_delta_weight(adapter).to(value.device)
        kept = any(part in name for part in self._kept)
        return value if kept else value.to(self.dtype)


def _plain_name(name: str) -> str:
    return name.replace("base_layer.", "")


def _is_of_peft(name: str) -> bool:
    return any(part.startswith("lora_") for part in name.split("."))


class _Shards:
    """safetensors files of at most so many bytes, or of one layer, and their index."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit, self._files = folder, limit, 0
        self._held: dict[str, Tensor] = {}
        self._where: dict[str, int] = {}
        self._total = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        size = sum(t.nbytes for t in (*self._held.values(), *tensors.values()))
        if self._held and size > self._limit:
            self._write()
        self._held |= tensors

    def _path(self, index: int) -> Path:
        return self._folder / f"model-part-{index}.safetensors"

    def _write(self) -> None:
        self._where |= dict.fromkeys(self._held, self._files)
        self._total += sum(t.nbytes for t in self._held.values())
        save_file(self._held, self._path(self._files), metadata={"format": "pt"})
        self._files, self._held = self._files + 1, {}

    def close(self) -> None:
        """Write the rest, give the files their names and write the index."""
        if self._held:
            self._write()
        if self._files == 1:
            self._path(0).replace(self._folder / "model.safetensors")
            return
        names = [f"model-{i + 1:05}-of-{self._files:05}.safetensors" for i in range(self._files)]
        for index, name in enumerate(names):
            self._path(index).replace(self._folder / name)
        index_text = {"metadata": {"total_size": self._total},
                      "weight_map": {name: names[i] for name, i in self._where.items()}}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index_text, indent=2))
