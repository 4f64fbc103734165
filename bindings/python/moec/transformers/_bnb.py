# SPDX-License-Identifier: Apache-2.0
"""bitsandbytes' 4-bit load of transformers, extended to experts: one stack at a time is quantised
as it is read, and a saved one is read from its published keys."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name

from ..torch._packed import PackedTensor
from ._load import ReadStack, extend, is_stack, why_dense, wrap
from ._packed import STACKS, is_in_out

_BLOCK = 64
# Patterns: transformers 5.17 takes the first that a key has, "down_proj" of "down_proj_bias", too.
_SUFFIXES = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map",
             ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4", "$")


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
    extend(Bnb4BitHfQuantizer)
