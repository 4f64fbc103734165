# SPDX-License-Identifier: Apache-2.0
"""Tokens of one rank, their routing, and the fewest bytes that it asks to be moved."""

import torch
from moec import epsim

SMALL_SHAPE = (64, 48, 8, 2)  # H, I, E, K


def generator(ranks, seed):
    """Of this rank's own numbers."""
    return torch.Generator(ranks.device).manual_seed(1000 * seed + ranks.rank)


class Batch:
    """T tokens of this rank: x [T,H], ids [T,K] of the experts with the largest logits [T,E], and
    their weights [T,K]."""

    def __init__(self, ranks, shape, x, logits):
        self.ranks, self.shape, self.x, self.tokens = ranks, shape, x, len(x)
        _, _, experts, top_k = shape
        best, ids = logits.float().topk(top_k)
        self.ids, self.weights = ids.int(), best.softmax(-1)
        self.each = experts // ranks.size
        self.owner = self.ids // self.each
        self.hits = torch.stack(
            [(self.owner == rank).any(1) for rank in range(ranks.size)], 1)
        """[T,N] whether a token has an expert at a rank"""
        every = torch.arange(ranks.size)
        table = torch.zeros(ranks.size, ranks.size, dtype=torch.int64)
        table[ranks.rank] = self.hits.sum(0).cpu()
        self.pairs = ranks.total(table.tolist())
        """[N,N] tokens that rank s has for rank d, each once"""
        self.load = ranks.total((self.owner.flatten().cpu()[:, None] == every).sum(0).tolist())
        """[N] rows (token, slot) of each rank's experts"""

    @classmethod
    def drawn(cls, ranks, shape, tokens):
        """All experts are equally liked; x is small integers, whose sums are exact in bf16."""
        made = generator(ranks, tokens)
        logits = torch.randn(tokens, shape[2], generator=made, device=ranks.device)
        x = torch.randint(0, 16, (tokens, shape[0]), generator=made, device=ranks.device,
                          dtype=torch.int32)
        return cls(ranks, shape, x.to(torch.bfloat16), logits)

    @property
    def imbalance(self):
        """The busiest rank's rows beside the mean."""
        return round(float(self.load.max() / self.load.double().mean()), 4)

    @property
    def capacity(self):
        """Tokens of a pair: mean + 4 sigma, or the most that there are."""
        part = float(self.pairs.double().mean()) / self.tokens
        spread = 4 * (self.tokens * part * (1 - part)) ** 0.5
        wanted = max(self.tokens * part + spread, float(self.pairs.max()))
        return min(self.tokens, int(wanted) + 1)

    @property
    def traffic(self):
        """As epsim takes it; of (token, slot) rows nothing is known."""
        pairs = self.pairs.numpy()
        return epsim.Traffic(self.tokens, pairs, pairs, self.load.numpy())

    def model_us(self, scheme, op):
        """What moec epsim says of one way, on GPUs of one host."""
        return epsim.replay(self.traffic, scheme, op, 2 * self.shape[0], 8 * self.shape[3],
                            epsim.DEFAULT).us

    @property
    def least_bytes(self):
        """Rows of 16 bits, each once per other rank: of the rank that sends or gets most."""
        away = self.pairs.clone().fill_diagonal_(0)
        return 2 * self.shape[0] * int(max(away.sum(0).max(), away.sum(1).max()))
