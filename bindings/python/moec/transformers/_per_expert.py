# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of compressed-tensors, AWQ and GPTQ: experts keep the file's codes, and train
adapters. What else there is of a model is transformers' and those libraries'."""

from __future__ import annotations

from typing import Any

from transformers.quantizers.quantizer_awq import AwqQuantizer
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer
from transformers.quantizers.quantizer_gptq import GptqHfQuantizer

from ._experts_load import extend_conversions
from ._load import extend, wrap


def _is_packed(quantiser: Any) -> bool:
    """dequantize=True asks for plain experts. transformers sets it, too, where the file is not
    compressed, such as one of a model whose linear layers a forward has decompressed."""
    config = quantiser.quantization_config
    return not (config.is_quantization_compressed and config.dequantize)


def register() -> None:
    """Extend the quantisers' classes."""
    for kind, wants in (
        (CompressedTensorsHfQuantizer, _is_packed), (AwqQuantizer, bool), (GptqHfQuantizer, bool),
    ):
        wrap(kind, "update_weight_conversions", extend_conversions(wants))
        extend(kind)
