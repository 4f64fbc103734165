# SPDX-License-Identifier: Apache-2.0
"""Schemes of quantised weights as quantised_bench.py makes them, on the GPU: codes of a stack
[E,N,K] in bf16, and the values that they stand for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import moec
import torch


@dataclass
class Coded:
    data: torch.Tensor
    quant: moec.Quant


@dataclass
class SchemeCase:
    scheme: moec.Scheme
    bits: float
    """Of a value, with its part of scales"""
    quantise: Callable[[torch.Tensor], Coded]
    values: Callable[[Coded], torch.Tensor]
    """In bf16, one rounding of fp32"""


def by_expert(stack, body):
    """body(matrix [N,K] f32) -> tensors, stacked: no fp32 copy of the whole stack."""
    made = [body(matrix.float()) for matrix in stack]
    return [torch.stack(parts) for parts in zip(*made)]


# ---- INT8, a scale for each output channel
def quantise_int8(stack):
    def one(w):
        scale = (w.abs().amax(1, keepdim=True) / 127.5).bfloat16().float()
        return (w / scale).round().clamp(-128, 127).to(torch.int8), scale

    codes, scales = by_expert(stack, one)
    return Coded(codes, moec.Quant(scales=scales))


def values_int8(coded: Coded) -> Any:
    scales: Any = coded.quant.scales
    return torch.stack([(q.float() * s).bfloat16() for q, s in zip(coded.data, scales)])


SCHEMES = {
    "moec-int8": SchemeCase(moec.Scheme.INT8, 8, quantise_int8, values_int8),
}
