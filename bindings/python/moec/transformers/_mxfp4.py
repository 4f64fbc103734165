# SPDX-License-Identifier: Apache-2.0
"""gpt-oss checkpoints in MXFP4: the experts keep the file's bytes, with or without the Triton
kernels that transformers has for them, and train."""

from __future__ import annotations

from typing import Any

from transformers.core_model_loading import WeightConverter
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from ._load import ReadStack, extend, wrap

_STACKS = ("gate_up_proj", "down_proj")


def _is_ours(quantiser: Any) -> bool:
    """Whether a load is of packed experts: `Mxfp4Config(dequantize=True)` asks for plain ones, and
    plain ones that are to be quantised need transformers' kernels."""
    return bool(quantiser.pre_quantized) and not quantiser.quantization_config.dequantize


def _validate(before: Any) -> Any:
    def validate_environment(self: Any, *args: Any, **more: Any) -> None:
        if not _is_ours(self):  # else there is nothing that this machine could lack
            before(self, *args, **more)
    return validate_environment


def _prepare(before: Any) -> Any:
    def _process_model_before_weight_loading(self: Any, model: Any, **more: Any) -> Any:
        if not _is_ours(self):
            return before(self, model, **more)
        self.modules_to_not_convert = self.get_modules_to_not_convert(
            model, self.quantization_config.modules_to_not_convert, model._keep_in_fp32_modules)
        return model
    return _process_model_before_weight_loading


def _conversions(before: Any) -> Any:
    def get_weight_conversions(self: Any) -> Any:
        if not _is_ours(self):
            return before(self)
        return [
            WeightConverter([f"experts.{name}_blocks", f"experts.{name}_scales"],
                            f"experts.{name}", [ReadStack(self, "mxfp4", turned=True)])
            for name in _STACKS
        ]
    return get_weight_conversions


def register() -> None:
    """Extend the quantiser's class."""
    wrap(Mxfp4HfQuantizer, "validate_environment", _validate)
    wrap(Mxfp4HfQuantizer, "_process_model_before_weight_loading", _prepare)
    wrap(Mxfp4HfQuantizer, "get_weight_conversions", _conversions)
    stock: Any = Mxfp4HfQuantizer.is_trainable

    def is_trainable(self: Any) -> bool:
        return _is_ours(self) or bool(stock.fget(self))

    Mxfp4HfQuantizer.is_trainable = property(is_trainable)
    extend(Mxfp4HfQuantizer)
