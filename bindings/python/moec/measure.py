# SPDX-License-Identifier: Apache-2.0
"""Timing one layer shape: moec, and the naive NumPy loop beside it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import naive, synth
from ._context import Context
from ._enums import GateLayout, Save
from ._tensors import empty, numpy_dtype
from .clock import Step, WallClock, clock_of
from .model import LayerSpec, MoeLayer, read_layer
from .shapes import Shape

_MIN_RUNS, _PATIENCE = 3, 4  # runs, but no more than this many times the time asked for
MOEC, NAIVE = "moec", "NumPy loop"


@dataclass(frozen=True, slots=True)
class Timing:
    """Median of the runs of one engine at one number of tokens."""

    engine: str
    tokens: int
    seconds: float
    spread: float
    """(slowest - fastest) / median"""
    runs: int
    gflops: float
    """of real rows, without padding, per second"""
    gbytes: float
    """bytes of the weights of the experts in use, per second (forward passes only)"""
    clock: str
    """what was timed"""


class Bench:
    """A random layer of a shape, ready to be timed on both engines."""

    def __init__(
        self, context: Context, shape: Shape, *, dtype: str, backward: bool, seed: int = 0,
        scheme: str | None = None,
    ) -> None:
        self.shape, self.backward = shape, backward
        self._context, self._clock = context, clock_of(context)
        made: Any = synth.make(shape, dtype=dtype, seed=seed, scheme=scheme)
        self.spec = read_layer(made, save=Save.ALL if backward else Save.NONE)
        # Training reads plain weights where they are; frozen ones may have a packed copy.
        frozen = not backward or self.spec.matrices.is_coded
        self.layer = MoeLayer(context, self.spec, frozen=frozen)
        if frozen:
            self.layer.pack()
        self._wide: LayerSpec | None = None
        self._rng = np.random.default_rng(seed)

    def time(self, engine: str, tokens: int, seconds: float) -> Iterator[Timing | int]:
        """Yield the number of runs so far, again and again, then the Timing: at least `seconds` and
        _MIN_RUNS runs after a warm-up, unless runs are so slow that _PATIENCE ends first."""
        step = self._steps(engine, tokens)
        clock = WallClock() if engine == NAIVE else self._clock
        samples = clock.time(step, 1)  # warm-up: threads, scratch, page faults
        yield 0
        if not samples[0] > _PATIENCE * seconds > 0:
            samples = clock.time(step, clock.batch)
        while sum(samples) < seconds or (
            len(samples) < _MIN_RUNS and sum(samples) < _PATIENCE * seconds
        ):
            yield len(samples)
            samples += clock.time(step, clock.batch)
        median = statistics.median(samples)
        flops = self.shape.flops(tokens, backward=self.backward, gated=self._gated)
        read = 0.0 if self.backward else self._weight_bytes(tokens)
        yield Timing(engine, tokens, median, (max(samples) - min(samples)) / median, len(samples),
                     flops / median / 1e9, read / median / 1e9, clock.name)

    @property
    def _gated(self) -> bool:
        return self.spec.matrices.layout.gate_layout != GateLayout.NONE

    def _steps(self, engine: str, tokens: int) -> Step:
        hidden = self.shape.hidden
        x32 = self._rng.standard_normal((tokens, hidden), np.float32)
        if engine == NAIVE:
            wide = self._widened()
            return lambda: naive.forward(x32, wide)
        x = self._context.asarray(x32.astype(numpy_dtype(self.spec.experts.dtype)))
        y = empty(x.shape, x, x)
        if not self.backward:
            return lambda: self.layer.forward(x, out=y)
        # Buffers are made once, as a training loop does.
        result = self.layer.forward(x, out=y)
        grads = self.layer.layer.backward(result, x)

        def step() -> None:
            again = self.layer.forward(x, out=y, saved=result.saved)
            self.layer.layer.backward(again, x, into=grads)

        return step

    @property
    def weight_bytes(self) -> int:
        """Of all experts as they are stored: values, or codes and scales."""
        shared = 0 if self.spec.shared is None else self.spec.shared.nbytes
        return self.spec.matrices.nbytes + shared

    @property
    def packed_bytes(self) -> int:
        """Of the packed copy; 0: the stored form is read."""
        held = (w.info() for w in (self.layer.weights, self.layer.shared) if w is not None)
        return sum(info.packed_bytes for info in held if info.is_packed)

    @property
    def weight_bits(self) -> float:
        """Stored bits of a weight, scales counted."""
        e, matrices = self.spec.experts, 3 if self._gated else 2
        rows = e.num_experts * e.inter + e.shared_inter
        return 8 * self.weight_bytes / (matrices * e.hidden * rows)

    def _weight_bytes(self, tokens: int) -> float:
        """Bytes of the experts that `tokens` tokens reach, each once, when routed evenly."""
        s = self.shape
        reached = 1 - (1 - s.top_k / (s.experts + s.zero_experts)) ** tokens
        shared = 0 if self.spec.shared is None else self.spec.shared.nbytes
        return self.spec.matrices.nbytes * reached + shared

    def _widened(self) -> LayerSpec:
        """The values in fp32, made once: NumPy's BLAS knows no narrower type."""
        if self._wide is None:
            with Context() as host:
                spec = self.spec
                shared = None if spec.shared is None else spec.shared.values(host)
                self._wide = replace(spec, matrices=spec.matrices.values(host), shared=shared)
        return self._wide
