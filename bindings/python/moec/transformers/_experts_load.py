# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose experts are quantised linear layers, one by one: the tensors of all experts are
put together as they are, and no value is made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.quantizers_utils import get_module_from_name

from .._enums import Orientation
from ..codes import find_kind
from ..kinds import ACTIVATIONS, BY_NAME, KINDS, name_of
from ..torch._packed import PackedTensor, Store
from ._experts import spec_of
from ._packed import STACKS, is_in_out

_PLAIN = "weight"
_ACTIVATIONS = frozenset(name for suffix in ACTIVATIONS if (name := name_of(_PLAIN, suffix)))
"""read and left: moec's activations are not quantised"""


def _companions() -> list[str]:
    """What the tensors of a matrix are called in the place of "weight", in every kind."""
    suffixes: list[str] = [suffix for kind in KINDS for suffix in (
        kind.codes, *kind.fields.values(), *kind.optional.values(), *kind.beside)]
    names = [name_of(_PLAIN, suffix) for suffix in (*suffixes, *ACTIVATIONS)]
    return list(dict.fromkeys(name for name in (_PLAIN, *names) if name is not None))


class ReadExperts(ConversionOps):  # type: ignore[misc]
    """The tensors of single experts -> one packed stack; plain experts go the way of before."""

    def __init__(self, quantiser: Any, before: WeightConverter) -> None:
        self.hf_quantizer = quantiser
        self._otherwise = list(before.operations)
        self._sources = list(before.source_patterns)
        self._places = {f"{source.removesuffix(_PLAIN)}{name}$": (source, name)
                        for source in self._sources for name in _companions()}

    @property
    def patterns(self) -> list[str]:
        return list(self._places)

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str],
        full_layer_name: str | None = None, model: Any = None, **more: Any,
    ) -> dict[str, Any]:
        assert full_layer_name is not None
        held: dict[str, dict[str, list[torch.Tensor]]] = {}
        for pattern, value in input_dict.items():
            source, name = self._places[pattern]
            if name not in _ACTIVATIONS:
                tensors = value if isinstance(value, list) else [value]
                held.setdefault(source, {})[name] = tensors
        if all(set(names) == {_PLAIN} and names[_PLAIN][0].itemsize > 1
               and names[_PLAIN][0].is_floating_point() for names in held.values()):
            found: dict[str, Any] = {source: names[_PLAIN] for source, names in held.items()}
            for operation in self._otherwise:
                found = operation.convert(
                    found, source_patterns=self._sources, target_patterns=target_patterns,
                    full_layer_name=full_layer_name, model=model, **more)
            return found
        module, leaf = get_module_from_name(model, full_layer_name)
        spec_of(module, 1)  # raises for experts that moec does not run
        if is_in_out(module):
            raise NotImplementedError(
                f"moec.transformers: {full_layer_name} is [in,out] in the model; linear layers of "
                "single experts are read into stacks [E,out,in]")
        like = module._parameters[leaf]
        path, count = full_layer_name.removesuffix(f".{leaf}"), like.shape[0]
        parts: dict[str, torch.Tensor] = {}
        stores: list[Any] = []
        for source in self._sources:
            own = f"{source.rpartition('.')[0].rpartition('.')[2]}."  # "gate_proj."
            tensors = held.get(source, {})
            for name, list_of in tensors.items():
                if len(list_of) != count:
                    raise RuntimeError(f"moec.transformers: {path} has {own}{name} of "
                                       f"{len(list_of)} experts in the checkpoint; {count} are "
                                       "needed")
            one = {f"{path}.0.{own}{name}": list_of[0] for name, list_of in tensors.items()}
            said = self.hf_quantizer.quantization_config.to_json_string(use_diff=False)
            config = {"quantization_config": json.loads(said)}
            stores.append((own, *find_kind(one, f"{path}.0.{own}{_PLAIN}", config)))
            parts |= {f"{own}{name}": torch.stack(list_of) for name, list_of in tensors.items()}
        kinds = {kind.name if kind else "plain" for _, kind, _ in stores}
        if len(kinds) > 1 or kinds == {"plain"}:
            raise RuntimeError(f"moec.transformers: {full_layer_name} is of {' and '.join(kinds)} "
                               "in the checkpoint; one kind of codes is needed")
        name = kinds.pop()
        turned = BY_NAME[name].orientation == Orientation.IN_OUT
        store = Store(name, count, names=tuple(f"{own}{_PLAIN}" for own, *_ in stores),
                      turned=turned, said=stores[0][2])
        packed = PackedTensor(parts, store, tuple(like.shape), like.dtype)
        _refuse_extents(packed, full_layer_name)
        return {full_layer_name: nn.Parameter(packed, requires_grad=False)}

    @property
    def reverse_op(self) -> Any:
        raise NotImplementedError("moec.transformers: packed experts are saved as they are")


def _refuse_extents(packed: PackedTensor, name: str) -> None:
    """Raise where the codes are not those of the model's shape."""
    coded = packed.matrices()  # raises CheckpointError, naming the tensor, for what does not fit
    turned = [one.extents[:: 1 if one.orientation == Orientation.OUT_IN else -1] for one in coded]
    whole = (sum(rows for rows, _ in turned), turned[0][1])
    if whole != tuple(packed.shape[1:]):
        raise RuntimeError(f"moec.transformers: {name} is {list(whole)} in the checkpoint, an "
                           f"expert; the model has {list(packed.shape[1:])}")


def conversions(quantiser: Any, given: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Those of experts in packed form, and the others."""
    ours: list[Any] = []
    rest: list[Any] = []
    for one in given:
        sources = getattr(one, "_original_source_patterns", [])
        targets = getattr(one, "_original_target_patterns", [])
        is_experts = isinstance(one, WeightConverter) and len(targets) == 1 and (
            targets[0].rpartition(".")[2] in STACKS) and all(
            "experts" in source and source.endswith(f".{_PLAIN}") for source in sources)
        if not is_experts:
            rest.append(one)
            continue
        read = ReadExperts(quantiser, one)
        ours.append(WeightConverter(read.patterns, list(targets), [read]))
    return ours, rest


def extend_conversions(wants: Callable[[Any], bool]) -> Callable[[Any], Any]:
    """For wrap(): update_weight_conversions() of a quantiser whose experts are to be packed."""
    def make(before: Any) -> Any:
        def update_weight_conversions(self: Any, weight_conversions: Any, *more: Any) -> Any:
            if not (self.pre_quantized and wants(self)):
                return before(self, weight_conversions, *more)
            ours, rest = conversions(self, weight_conversions)
            return ours + before(self, rest, *more)
        return update_weight_conversions
    return make
