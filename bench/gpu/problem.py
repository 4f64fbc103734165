# SPDX-License-Identifier: Apache-2.0
"""One layer's data on the GPU, and the time that physics asks of it.

FLOPs count real rows: 6 T K H I for a forward, 18 T K H I with its backward.
"""

import torch
from layers import SHAPES

PEAK_FLOPS = 790e12  # dense bf16 on random data, as an H200 holds it
PEAK_BYTES = 4.3e12  # device copy, bytes read and written


def normal(*size, scale=1.0):
    return torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(0, scale)


def difference(got, want):
    """The worst row's error; a row below the rows' root mean square counts by that."""
    got, want = (t.detach().reshape(-1, t.shape[-1]).float() for t in (got, want))
    norms = want.norm(dim=1)
    floor = norms.square().mean().sqrt().clamp(min=1e-30)  # gradients of experts without rows: 0
    return float(((got - want).norm(dim=1) / torch.maximum(norms, floor)).max())


class Matrices:
    """w1 [E,2I,H], gate rows first, and w2 [E,H,I]: drawn once for all numbers of tokens."""

    def __init__(self, name):
        torch.manual_seed(7)
        self.name, self.shape = name, SHAPES[name]
        h, i, e, _ = self.shape
        self.w1, self.w2 = normal(e, 2 * i, h, scale=h**-0.5), normal(e, h, i, scale=i**-0.5)


class Problem:
    """T tokens: x and d_y [T,H] bf16, logits [T,E] f32, ids [T,K] i32 of the largest, weights [T,K]
    f32 that sum to 1."""

    def __init__(self, matrices, tokens):
        self.name, self.shape, self.tokens = matrices.name, matrices.shape, tokens
        self.w1, self.w2 = matrices.w1, matrices.w2
        torch.manual_seed(1000 + tokens)
        self.x, self.d_y = normal(tokens, self.shape.hidden), normal(tokens, self.shape.hidden)
        bias = 0.3 * torch.randn(self.shape.experts, device="cuda")  # some experts are liked more
        self.logits = bias + torch.randn(tokens, self.shape.experts, device="cuda")
        best, ids = torch.topk(self.logits, self.shape.top_k)
        self.weights = torch.softmax(best, -1)
        self.ids = ids.to(torch.int32)
        self.hit = int(torch.unique(self.ids).numel())

    def flops(self, mode):
        h, i, _, k = self.shape
        return (18 if mode == "fwdbwd" else 6) * self.tokens * k * h * i

    def floor_ms(self, mode):
        """The larger of the products at the peak, and of what must move: the weights of the experts
        hit (once more for the backward, and every expert's gradient written), x, y, d_y and d_x."""
        h, i, e, _ = self.shape
        matrix, tokens = 3 * h * i * 2, self.tokens * h * 2
        moved = self.hit * matrix + 2 * tokens
        if mode == "fwdbwd":
            moved = (2 * self.hit + e) * matrix + 4 * tokens
        return 1e3 * max(self.flops(mode) / PEAK_FLOPS, moved / PEAK_BYTES)
