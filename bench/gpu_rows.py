# SPDX-License-Identifier: Apache-2.0
"""Rows of bench/results/<gpu>/layer.json, as bench/gpu/layer_bench.py writes them."""

import json

STEADY = 0.1  # (largest - smallest window) / median; above it a peer decides nothing


class Rows:
    def __init__(self, path):
        self.file = json.loads(path.read_text())
        self.all = self.file["rows"]
        self.shapes = list(dict.fromkeys(row["shape"] for row in self.all))

    def of(self, shape, tokens, mode, impl="moec"):
        return [row for row in self.all if (row["shape"], row["tokens"], row["mode"], row["impl"])
                == (shape, tokens, mode, impl)]

    def best(self, shape, tokens, mode, impl="moec"):
        """The faster of eager and graph, or None."""
        return min(self.of(shape, tokens, mode, impl), key=lambda row: row["ms"], default=None)

    def over(self, shape, tokens, mode, other, impl="moec"):
        """Time of impl / time of other, where they took turns, in the last call that had both;
        None without such a call, or when a peer's windows disagree: the host or something else
        held it up."""
        pairs = []
        for row in self.of(shape, tokens, mode, other):
            if row["spread"] > STEADY:
                continue
            times = {}
            for name, ms in row.get("beside", {}).items():
                base = name.split("/")[0]
                times[base] = min(ms, times.get(base, ms))
            if impl in times and other in times:
                pairs.append((row["call"], times[impl] / times[other]))
        return max(pairs)[1] if pairs else None

    def times_as_fast(self, shape, tokens, mode, other, impl="moec"):
        """As over(), the other way round: above 1 is faster than `other`."""
        ratio = self.over(shape, tokens, mode, other, impl)
        return ratio and 1 / ratio

    def floor_ratio(self, shape, tokens, mode="fwd"):
        row = self.best(shape, tokens, mode)
        return row and row["ms"] / row["floor_ms"]
