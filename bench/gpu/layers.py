# SPDX-License-Identifier: Apache-2.0
"""The shapes of the layers that are measured on a GPU."""

from typing import NamedTuple


class Shape(NamedTuple):
    hidden: int
    inter: int
    experts: int
    top_k: int


LAYERS = {
    "gpt-oss-20b": Shape(2880, 2880, 32, 4),
    "gpt-oss-120b": Shape(2880, 2880, 128, 4),
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "olmoe": Shape(2048, 1024, 64, 8),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "sonic-30b": Shape(4096, 1024, 128, 8),
    "dsv3": Shape(7168, 2048, 256, 8),
}
# Features that end inside a tile, and a neighbour whose features fill tiles.
TAILS = (2880, 3072), (1856, 1792), (704, 768)
SHAPES = LAYERS | {f"I{inter}": Shape(2048, inter, 64, 8) for pair in TAILS for inter in pair}
