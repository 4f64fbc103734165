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
    values: Callable[[Coded, torch.Size], torch.Tensor]
    """In bf16, one rounding of fp32, [E,N,K]"""


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


def values_int8(coded: Coded, _: torch.Size) -> Any:
    scales: Any = coded.quant.scales
    return torch.stack([(q.float() * s).bfloat16() for q, s in zip(coded.data, scales)])


# ---- as moec makes them on the GPU
def made(kind, **options):
    """A scheme's codes and scales of a stack."""
    def quantise(stack):
        q = moec.quantise(moec.Context("cuda"), stack, kind, **options)
        torch.cuda.synchronize()
        return Coded(q.codes, q.quant)

    return quantise


def nf4_bf16_scales(stack):
    """NF4 whose scales are cast: its values are those of the scales that are bound."""
    coded = made("nf4")(stack)
    coded.quant.scales = coded.quant.scales.bfloat16()
    return coded


def nibbles(codes, high_first=False):
    """Of bytes, or of words with the first nibble lowest: a last dimension of them."""
    codes = codes.contiguous().view(torch.uint8)
    pair = (codes >> 4, codes & 15) if high_first else (codes & 15, codes >> 4)
    return torch.stack(pair, -1).flatten(-2).long()


def in_blocks(numbers, scales):
    """numbers [N,K] f32 times scales [N, blocks of K] f32, rounded."""
    n, k = numbers.shape
    return (numbers.view(n, scales.shape[1], -1) * scales[..., None]).view(n, k).bfloat16()


def values_nf4(coded, shape):
    book, block = coded.quant.codebook, coded.quant.block_k or 64
    experts, n, k = shape
    codes, scales = coded.data.view(experts, -1), coded.quant.scales.view(experts, n, k // block)
    return torch.stack([in_blocks(book[nibbles(c, True)].view(n, k), s)
                        for c, s in zip(codes, scales)])


def values_mxfp4(coded, shape):
    book = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=coded.data.device)
    book = torch.cat([book, -book])
    experts, n, k = shape
    codes, scales = coded.data.view(experts, n, k // 2), coded.quant.scales.view(experts, n, -1)
    return torch.stack([in_blocks(book[nibbles(c)], torch.exp2(s.view(torch.uint8).float() - 127))
                        for c, s in zip(codes, scales)])


def values_int4(coded, shape):
    experts, n, k = shape
    scales = coded.quant.scales.view(experts, n, -1).float()
    return torch.stack([in_blocks(nibbles(c).view(n, k).float() - 8, s)
                        for c, s in zip(coded.data, scales)])


def values_fp8(coded, shape):
    experts, n, k = shape
    def one(codes, scales):
        whole = scales.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        return (codes.view(torch.float8_e4m3fn).float() * whole).bfloat16()

    return torch.stack([one(c, s) for c, s in zip(coded.data, coded.quant.scales)])


SCHEMES = {
    "moec-int8": SchemeCase(moec.Scheme.INT8, 8, quantise_int8, values_int8),
    "moec-fp8": SchemeCase(moec.Scheme.FP8, 8, made("fp8", block_n=128, block_k=128,
                                                    scale_dtype="float32"), values_fp8),
    "moec-nf4": SchemeCase(moec.Scheme.CODEBOOK4, 4.5, made("nf4"), values_nf4),
    "moec-nf4-bf16": SchemeCase(moec.Scheme.CODEBOOK4, 4.25, nf4_bf16_scales, values_nf4),
    "moec-mxfp4": SchemeCase(moec.Scheme.MXFP4, 4.25, made("mxfp4"), values_mxfp4),
    "moec-int4": SchemeCase(moec.Scheme.INT4, 4.5, made("int4", block_k=32), values_int4),
}
