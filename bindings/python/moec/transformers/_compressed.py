# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of compressed-tensors: experts keep the file's codes, and train adapters."""

from __future__ import annotations

from typing import Any

from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

from ._experts_load import extend_conversions
from ._load import extend, wrap


def _is_packed(quantiser: Any) -> bool:
    """dequantize=True asks for plain experts. transformers sets it, too, where the file is not
    compressed, such as one of a model whose linear layers a forward has decompressed."""
    config = quantiser.quantization_config
    return not (config.is_quantization_compressed and config.dequantize)


def register() -> None:
    """Extend the quantiser's class."""
    wrap(CompressedTensorsHfQuantizer, "update_weight_conversions", extend_conversions(_is_packed))
    extend(CompressedTensorsHfQuantizer)
