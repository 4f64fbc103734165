# SPDX-License-Identifier: Apache-2.0
"""A byte-level language model whose feed-forward blocks are mixtures of experts, on moec or on
PyTorch's grouped_mm; the same parameters under the same names either way."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import moec
import moec.torch

HIDDEN, INTER, EXPERTS, TOP_K, LAYERS, HEADS, CONTEXT = 192, 256, 16, 2, 4, 6, 128


class GroupedExperts(nn.Module):
    """Router and experts in plain PyTorch: sort by expert, two grouped products, back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_weight = nn.Parameter(torch.empty(EXPERTS, HIDDEN))
        self.gate_up = nn.Parameter(torch.empty(EXPERTS, 2 * INTER, HIDDEN))
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INTER))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, HIDDEN)
        weights, ids = torch.softmax(rows @ self.gate_weight.T, -1).topk(TOP_K)
        weights = weights / weights.sum(-1, keepdim=True)
        order = torch.argsort(ids.flatten(), stable=True)
        ends = torch.bincount(ids.flatten(), minlength=EXPERTS).cumsum(0).to(torch.int32)
        both = functional.grouped_mm(rows[order // TOP_K], self.gate_up.mT, offs=ends)
        gate, up = both.chunk(2, -1)
        out = functional.grouped_mm(functional.silu(gate) * up, self.down.mT, offs=ends)
        out = out * weights.flatten()[order, None]
        return out[torch.argsort(order)].view(len(rows), TOP_K, HIDDEN).sum(1).view(x.shape)


def moec_experts() -> nn.Module:
    """The same, as one module of moec."""
    return moec.torch.MoELayer(
        moec.RouterDesc(num_experts=EXPERTS, top_k=TOP_K, norm=moec.Norm.SUM),
        moec.ExpertsDesc(hidden=HIDDEN, inter=INTER, num_experts=EXPERTS, top_k=TOP_K),
    )


MAKERS = {"moec": moec_experts, "grouped_mm": GroupedExperts}


class Block(nn.Module):
    def __init__(self, implementation: str) -> None:
        super().__init__()
        self.before = nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.between = nn.RMSNorm(HIDDEN)
        self.experts = MAKERS[implementation]()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, HIDDEN))
        return x + self.experts(self.between(x))


class LanguageModel(nn.Module):
    def __init__(self, implementation: str, seed: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, HIDDEN)
        self.places = nn.Embedding(CONTEXT, HIDDEN)
        self.blocks = nn.Sequential(*(Block(implementation) for _ in range(LAYERS)))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, 256, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():  # by name, so that both implementations start alike
            for _, parameter in sorted(self.named_parameters()):
                if parameter.dim() > 1:
                    deviation = 0.5 * parameter.shape[-1] ** -0.5
                    parameter.copy_(deviation * torch.randn(parameter.shape, generator=generator))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.bytes(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))

    def loss(self, ids: Tensor) -> Tensor:
        """Mean cross-entropy of each next byte, in nats."""
        logits = self(ids[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
