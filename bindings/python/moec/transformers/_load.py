# SPDX-License-Identifier: Apache-2.0
"""What the loads of all formats share: transformers' quantisers get methods that know of packed
stacks, around those that they have."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module

from ..torch._packed import PackedTensor, Store
from ._experts import spec_of
from ._packed import STACKS, has_packed, is_in_out
from ._report import refuse_left_out
from ._save import published_state

Mark = Callable[[Any, Any], None]


def why_dense(module: nn.Module, path: str, quantiser: Any) -> str | None:
    """Why a quantiser leaves a stack of experts plain; None: it packs it."""
    skipped = getattr(quantiser, "modules_to_not_convert", None)
    # A pattern is the end of a name: of the module's or of the parameter's.
    names = (path, path.rpartition(".")[0])
    if not all(should_convert_module(name, skipped) for name in names):
        return f"the quantization_config skips {', '.join(sorted(skipped))}"
    try:
        spec_of(module, 1)
    except NotImplementedError as error:
        return str(error)
    return None


def is_stack(module: nn.Module, name: str) -> bool:
    """Whether a parameter is a stack of a module that transformers dispatches as experts."""
    value = module._parameters.get(name)
    return hasattr(module, "_apply_gate") and name in STACKS and value is not None and (
        value.dim() == 3)


class ReadStack(ConversionOps):  # type: ignore[misc]
    """Published tensors of a stack -> packed ones; plain values pass."""

    def __init__(self, quantiser: Any, kind: str, turned: bool = False) -> None:
        self.hf_quantizer, self._kind, self._turned = quantiser, kind, turned

    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str | None = None, model: Any = None,
        **_: Any,
    ) -> dict[str, Any]:
        assert full_layer_name is not None
        module, leaf = get_module_from_name(model, full_layer_name)
        like = module._parameters[leaf]
        suffixes = {name: name.rpartition(leaf)[2].rstrip("$") for name in input_dict}
        parts = {suffixes[name]: value[0] if isinstance(value, list) else value
                 for name, value in input_dict.items()}
        if set(parts) == {""} and parts[""].is_floating_point():
            return {full_layer_name: parts[""].to(like.dtype)}
        store = Store(self._kind, like.shape[0], turned=self._turned, in_out=is_in_out(module))
        packed = PackedTensor(parts, store, tuple(like.shape), like.dtype)
        packed.matrices()  # raises CheckpointError, naming the tensor, for what does not fit
        return {full_layer_name: nn.Parameter(packed, requires_grad=False)}

    @property
    def reverse_op(self) -> Any:
        raise NotImplementedError("moec.transformers: packed experts are saved as they are")


def wrap(owner: type, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a method by what `make` makes of it, once."""
    before: Any = getattr(owner, name)
    if not getattr(before, "_is_moec", False):
        after = wraps(before)(make(before))
        after._is_moec = True
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(after) if is_static else after)


def _state(before: Any) -> Any:
    def get_state_dict_and_metadata(self: Any, model: Any) -> Any:
        state, metadata = before(self, model)
        return published_state(model, state), metadata
    return get_state_dict_and_metadata


def _loaded(before: Any, mark: Mark | None = None) -> Any:
    def _process_model_after_weight_loading(self: Any, model: Any, **more: Any) -> Any:
        packed = [module for module in model.modules()
                  if hasattr(module, "_apply_gate") and has_packed(module)]
        for module in packed:
            module.config._experts_implementation_internal = "moec"
        if packed and mark is not None:
            mark(self, model)
        return before(self, model, **more)
    return _process_model_after_weight_loading


def _finalised(before: Any) -> Any:
    def _finalize_model_loading(model: Any, load_config: Any, loading_info: Any) -> Any:
        found = before(model, load_config, loading_info)
        if load_config.hf_quantizer is not None:
            mismatched = {key for key, *_ in loading_info.mismatched_keys}
            refuse_left_out(model, {*loading_info.missing_keys, *loading_info.unexpected_keys,
                                    *mismatched})
        return found
    return _finalize_model_loading


def extend(quantiser: type, mark: Mark | None = None) -> None:
    """Let a quantiser's models run on moec where they are packed, and save in published keys.
    mark(quantiser, model): called for a model that has packed experts."""
    wrap(quantiser, "get_state_dict_and_metadata", _state)
    wrap(quantiser, "_process_model_after_weight_loading", partial(_loaded, mark=mark))
    wrap(PreTrainedModel, "_finalize_model_loading", _finalised)
