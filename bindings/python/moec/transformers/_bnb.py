# SPDX-License-Identifier: Apache-2.0
"""bitsandbytes' 4-bit load of transformers, extended to experts: one stack at a time is quantised
as it is read, and a saved one is read from its published keys.

A saved model with packed experts has a quant_method of its own in its config.json. transformers
without moec has no quantiser of that name, takes the model for a plain one and refuses the shapes
of the codes; of the name "bitsandbytes" transformers 5.17 would take codes for values."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import BitsAndBytesConfig
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name

from ..quant_config import PACKED_BNB
from ..torch._packed import PackedTensor
from ._load import ReadStack, extend, is_stack, why_dense, wrap
from ._packed import STACKS, is_in_out

_BLOCK = 64
# Patterns: transformers 5.17 takes the first that a key has, "down_proj" of "down_proj_bias", too.
_SUFFIXES = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map",
             ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4", "$")


class PackedConfig(BitsAndBytesConfig):  # type: ignore[misc]
    """That of a model with packed experts, as it is saved; loads begin with BitsAndBytesConfig."""

    @classmethod
    def of(cls, config: Any) -> PackedConfig:
        made = copy.copy(config)
        made.__class__ = cls
        return made  # type: ignore[no-any-return]

    def to_dict(self) -> dict[str, Any]:
        said = {name: value for name, value in super().to_dict().items()
                if not name.endswith(("load_in_4bit", "load_in_8bit"))}
        return said | {"quant_method": PACKED_BNB}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        said = {name: value for name, value in config_dict.items() if name != "quant_method"}
        return BitsAndBytesConfig.from_dict({**said, "load_in_4bit": True}, *args, **kwargs)


def _mark(quantiser: Any, model: Any) -> None:
    quantiser.quantization_config = PackedConfig.of(quantiser.quantization_config)
    model.config.quantization_config = quantiser.quantization_config


class _Quantise(ConversionOps):  # type: ignore[misc]
    """Plain values, as they lie in the merged stack -> packed ones."""

    def __init__(self, quantiser: Any, otherwise: Any) -> None:
        self.hf_quantizer, self.otherwise = quantiser, otherwise

    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str | None = None, model: Any = None,
        **more: Any,
    ) -> dict[str, Any]:
        import bitsandbytes.functional as functional  # type: ignore[import-not-found]

        found: dict[str, Any] = {}
        config = self.hf_quantizer.quantization_config
        for name, value in input_dict.items():
            module, leaf = get_module_from_name(model, name)
            if not is_stack(module, leaf):
                return self.otherwise.convert(  # type: ignore[no-any-return]
                    input_dict, full_layer_name=full_layer_name, model=model, **more)
            one = value[0] if isinstance(value, list) else value
            one = one.to(module._parameters[leaf].dtype)
            codes, state = functional.quantize_4bit(
                one.contiguous(), blocksize=_BLOCK, quant_type=config.bnb_4bit_quant_type,
                compress_statistics=config.bnb_4bit_use_double_quant,
            )
            packed = PackedTensor.from_bnb(codes, state, in_out=is_in_out(module))
            found[name] = nn.Parameter(packed, requires_grad=False)
        return found


def _needs(before: Any) -> Any:
    def param_needs_quantization(self: Any, model: Any, param_name: str, **more: Any) -> bool:
        module, leaf = get_module_from_name(model, param_name)
        if is_stack(module, leaf):
            return why_dense(module, param_name, self) is None
        return bool(before(self, model, param_name, **more))
    return param_needs_quantization


def _operations(before: Any) -> Any:
    def get_quantize_ops(self: Any) -> Any:
        return _Quantise(self, before(self))
    return get_quantize_ops


def _conversions(before: Any) -> Any:
    def update_weight_conversions(self: Any, weight_conversions: Any, *more: Any) -> Any:
        found = before(self, weight_conversions, *more)
        if not self.pre_quantized:
            return found
        return found + [
            WeightConverter([f"experts.{leaf}{suffix}" for suffix in _SUFFIXES],
                            f"experts.{leaf}", [ReadStack(self, "bnb")]) for leaf in STACKS
        ]
    return update_weight_conversions


def register() -> None:
    """Extend the quantiser's class; what others put there before stays in the chain."""
    wrap(Bnb4BitHfQuantizer, "param_needs_quantization", _needs)
    wrap(Bnb4BitHfQuantizer, "get_quantize_ops", _operations)
    wrap(Bnb4BitHfQuantizer, "update_weight_conversions", _conversions)
    extend(Bnb4BitHfQuantizer, _mark)
    AUTO_QUANTIZATION_CONFIG_MAPPING[PACKED_BNB] = PackedConfig
