# SPDX-License-Identifier: Apache-2.0
"""Calls of the library on torch tensors: contexts, engines, weights, one forward, one backward."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _raw
from .._context import Context
from .._descriptors import PlanDesc, RouterDesc, WeightsDesc, to_raw
from .._enums import DType, GateLayout, GradFlags, Orientation, Save, WeightsFlags
from .._experts import Experts, Sizes
from .._fields import GRADIENTS, INPUTS
from .._handle import Handle
from .._layer import Layer
from .._router import Router
from .._spec import ROUTED_WEIGHTS, SHARED_WEIGHTS, Spec
from .._weights import WEIGHTS, Weights
from . import _adapted
from ._eps import EP
from ._layouts import turned_sets
from ._structs import DEVICES, FLOATS, Tensors, buffer, code_of, filled, weight_set

_core = _raw._core
_IN_SETS: dict[str, tuple[str | None, str]] = {
    name: (of, field)
    for of, names in (("d_expert_weights", ROUTED_WEIGHTS), ("d_shared_weights", SHARED_WEIGHTS))
    for name, field in zip(names, WEIGHTS, strict=True)
}
_GRADIENTS = {noun: _IN_SETS | {name: (None, f"d_{name}")
                                for name in GRADIENTS[f"moec_{noun}_grad_args"]}
              for noun in ("experts", "layer")}
"""input of an operator -> where its gradient is in a call's arguments: its set, and its field"""
_shape_and_dtype = attrgetter("shape", "dtype")
_PROCESS = os.getpid()  # a fork has none of the threads of OpenMP


def context_of(device: torch.device) -> Context:
    """The context of a device, with as many CPU threads as torch has; another after a fork."""
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return _context(device.type, device.index or 0, threads, os.getpid())


@lru_cache(maxsize=64)
def _context(kind: str, index: int, threads: int, process: int) -> Context:
    if kind not in DEVICES:
        raise TypeError(f"moec.torch: tensors on {kind}; cpu and cuda can be used")
    if kind == "cpu":
        return Context(kind, num_threads=threads, openmp=process == _PROCESS)
    return Context(f"{kind}:{index}")


def _real_device(device: torch.device) -> torch.device:
    """Sizes of a meta tensor's layer are those of the CPU."""
    return torch.device("cpu") if device.type == "meta" else device


class Engine:
    """A Spec on one device, for one element type and save policy."""

    def __init__(self, spec: Spec, context: Context, dtype: DType, save: Save) -> None:
        self.spec, self.context = spec, context
        self.desc = replace(spec.experts, dtype=dtype, save=save)
        self.ep = EP.of(spec.ep) if spec.ep else None
        self.handle: Experts | Layer
        self.noun = "experts" if spec.router is None else "layer"
        if spec.router is None:
            self.handle = Experts(context, self.desc)
        else:
            router = replace(spec.router, data_dtype=dtype)
            self.handle = Layer(context, router, self.desc, ep=self.ep)
        self.sizes: Sizes = self.handle.sizes
        self.bound: dict[Any, Weights] = {}
        self.plans: dict[int, tuple[Any, int]] = {}
        self.adapted: dict[Any, tuple[_adapted.Bound, Sizes]] = {}
        self.adapted_sizes: dict[Any, Sizes] = {}

    def sizes_with(self, text: str, factors: Sequence[Tensor]) -> Sizes:
        """Memory of a call with these factors, which may be a tracer's."""
        if not text:
            return self.sizes
        key = (text, *((tuple(map(int, t.shape)), t.dtype) for t in factors))
        found = self.adapted_sizes.get(key)
        if found is None:
            place = torch.device(*self.place)
            with torch.utils._python_dispatch._disable_current_modes():
                alike = [torch.empty(shape, dtype=dtype, device=place) for shape, dtype in key[1:]]
                made = _adapted.Bound(self.context, self.desc, text, alike)
                found = self.handle.sizes_with(made.adapters)
            if len(self.adapted_sizes) >= 256:
                self.adapted_sizes.clear()
            self.adapted_sizes[key] = found
        return found

    @property
    def place(self) -> tuple[str, int]:
        """Type and index of the device, as torch has them."""
        kind = next(n for n, code in DEVICES.items() if code == self.context.device_type)
        return kind, self.context.device_id

    def adapters(self, text: str, factors: Sequence[Tensor]) -> tuple[_adapted.Bound, Sizes]:
        """Adapters over these addresses, and the memory of calls with them."""
        key = (text, *map(Tensor.data_ptr, factors), *map(_shape_and_dtype, factors),
               *map(Tensor.stride, factors))
        found = self.adapted.get(key)
        if found is None:
            if len(self.adapted) >= 256:
                self.adapted.clear()
            made = _adapted.Bound(self.context, self.desc, text, factors)
            found = self.adapted[key] = made, self.sizes_with(text, factors)
        return found

    def plan_memory(self, tokens: int) -> tuple[Any, int]:
        """Description of a plan for so many tokens, and its bytes."""
        found = self.plans.get(tokens)
        if found is None:
            if len(self.plans) >= 1024:
                self.plans.clear()
            desc = self.desc
            raw = to_raw(PlanDesc(max_tokens=tokens, num_experts=desc.num_experts,
                                  top_k=desc.top_k, num_zero_experts=desc.num_zero_experts,
                                  align=desc.align, expert_begin=desc.expert_begin,
                                  expert_end=desc.expert_end), _raw.moec_plan_desc)
            found = self.plans[tokens] = raw, _raw.moec_plan_size(raw)[0]
        return found

    def weights(self, tensors: Tensors, names: tuple[str, ...], layout: GateLayout) -> Weights:
        """Weights over these addresses. Nothing is packed: values are read by each call."""
        given = {f: tensors.get(n) for f, n in zip(WEIGHTS, names, strict=True)}
        key = (names, layout, *(t if t is None else (t.data_ptr(), t.shape, t.stride(), t.dtype)
                                for t in given.values()))
        found = self.bound.get(key)
        if found is None:
            if len(self.bound) >= 256:
                self.bound.clear()
            spec = self.spec
            orientations = (spec.gate_up_orientation, spec.down_orientation)
            if names is SHARED_WEIGHTS:  # always as nn.Linear has them
                orientations = (Orientation.OUT_IN, Orientation.OUT_IN)
            found = self.bound[key] = bind(self.context, given, layout, *orientations)
        return found


@lru_cache(maxsize=1024)
def _engine(text: str, kind: str, index: int, threads: int, pid: int, dtype: torch.dtype, save: int
            ) -> Engine:
    context = _context(kind, index, threads, pid)
    return Engine(Spec.parse(text), context, code_of(dtype, "x", FLOATS), Save(save))


def engine_of(text: str, x: Tensor, save: int) -> Engine:
    """The engine for a spec and the x of a call (which may be a tracer's)."""
    device = _real_device(x.device)
    kind = device.type
    if number := Spec.parse(text).ep:
        return _engine_of_ep(text, number, code_of(x.dtype, "x", FLOATS), save)
    threads = torch.get_num_threads() if kind == "cpu" else 0
    return _engine(text, kind, device.index or 0, threads, os.getpid(), x.dtype, save)


def ep_of(text: str) -> EP | None:
    """The ep of a spec, for what waits for its backward to keep."""
    number = Spec.parse(text).ep
    return EP.of(number) if number else None


def _engine_of_ep(text: str, number: int, dtype: DType, save: int) -> Engine:
    """On the ep's context; it lives as long as the ep."""
    ep = EP.of(number)
    key = (text, dtype, save)
    if key not in ep.engines:
        ep.engines[key] = Engine(Spec.parse(text), ep.comm.context, dtype, Save(save))
    return ep.engines[key]


def bind(
    context: Context, given: Tensors, layout: GateLayout, gate_up: Orientation, down_: Orientation,
    frozen: bool = False,
) -> Weights:
    """Weights bound to the tensors given by WeightSet's names, without keeping them alive. The
    orientations are those of the tensors' shapes; each expert may lie turned."""
    down = given["down"]
    if down is None:
        raise TypeError("moec.torch: down is missing; it gives the sizes")
    gate_up_turned, down_turned = turned_sets(given)
    biases = [(f, t) for f, t in given.items() if f.endswith("_bias") and t is not None]
    out, inner = down.shape[1:] if down_ == Orientation.OUT_IN else down.shape[:0:-1]
    desc = WeightsDesc(
        num_experts=down.shape[0], hidden=out, inter=inner, gate_layout=layout,
        flags=WeightsFlags.FROZEN if frozen else WeightsFlags.NONE,
        gate_up_orientation=Orientation(gate_up ^ gate_up_turned),
        down_orientation=Orientation(down_ ^ down_turned),
        dtype=code_of(down.dtype, "down", FLOATS),
        bias_dtype=code_of(biases[0][1].dtype, biases[0][0], FLOATS) if biases else 0,
    )
    weights = Weights(context, desc)
    keep: list[Any] = []
    _core.call_args_weights_bind(weight_set(given, keep), weights.raw)
    return weights


def current_stream(x: Tensor) -> int:
    """torch's stream of a tensor's device, as the library takes it."""
    return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0


class Plan(Handle):
    """A plan of a call of experts, in memory of torch's."""

    _free = _core.moec_plan_free

    def __init__(self, engine: Engine, x: Tensor, ids: Tensor, weights: Tensor, stream: int
                 ) -> None:
        raw_desc, num_bytes = engine.plan_memory(x.shape[0])
        self._memory = x.new_empty((num_bytes,), dtype=torch.uint8)
        args = filled("topk_args", {"expert_ids": ids, "routing_weights": weights},
                      buffer("memory", self._memory))
        self._pointer = _core.call_args_plan_from_topk(args, engine.context.raw, raw_desc, stream)


class Before(NamedTuple):
    """What a backward takes over from its forward."""

    engine: Engine
    plan: Plan | None
    """of the same ids and routing weights; None: of a layer, or none is there yet"""


class Call:
    """One call's handles and arguments, from contiguous tensors. plan: that of `before`; of experts
    without one, this call's later."""

    def __init__(
        self, before: Before, tensors: Tensors, factors: Sequence[Tensor], frozen: Weights | None,
        rng_offset: int, adapters: str = "",
    ) -> None:
        self.engine, self.plan = engine, _ = before
        self.tensors, self.frozen = tensors, frozen
        self.sizes, self.keep = engine.sizes, list[Any]()
        self.adapted: _adapted.Bound | None = None
        if factors:
            self.adapted, self.sizes = engine.adapters(adapters, factors)
        self.rng_offset = rng_offset
        self.x = tensors["x"]
        self.stream = current_stream(self.x)

    def _handles(self) -> dict[str, int]:
        """The words of what this call is bound to."""
        spec = self.engine.spec
        # The engine may drop them before this call ends: to bind the shared ones, or for another
        # thread.
        routed = self.frozen or self._bound(ROUTED_WEIGHTS, spec.gate_layout)
        words = {"weights": int(routed.raw)}
        self.keep.append(routed)
        if "shared_expert_down" in self.tensors:
            shared = self._bound(SHARED_WEIGHTS, spec.shared_gate_layout)
            words["shared_weights"] = int(shared.raw)
            self.keep.append(shared)
        if self.adapted is not None:
            words["adapters"] = int(self.adapted.adapters.raw)
        if self.engine.noun == "layer":
            words["rng_offset"] = self.rng_offset
        elif self.plan is None:
            ids, weights = self.tensors["expert_ids"], self.tensors["routing_weights"]
            self.plan = Plan(self.engine, self.x, ids, weights, self.stream)
        if self.plan is not None:
            words["plan"] = int(self.plan.raw)
        return words

    def _bound(self, names: tuple[str, ...], layout: GateLayout) -> Weights:
        return self.engine.weights(self.tensors, names, layout)

    def _around(self, kind: str) -> dict[str, Tensor]:
        """The inputs that are in a struct of this kind."""
        fields = INPUTS[kind]
        return {n: t for n, t in self.tensors.items() if n in fields}

    def _workspace(self, size: Any) -> dict[str, int]:
        """Its words on a device: from torch's caching allocator, which knows streams and graph
        capture. On the CPU it is the context's own, whose pages are warm."""
        if self.x.device.type == "cpu":
            return {}
        memory = self.x.new_empty((size.bytes(self.x.shape[0]),), dtype=torch.uint8)
        self.keep.append(memory)
        return buffer("workspace", memory)

    def _run(self, direction: str, args: Any) -> None:
        function = getattr(_core, f"call_args_{self.engine.noun}_{direction}")
        function(args, self.engine.handle.raw, self.stream)

    def forward(self, y: Tensor, saved: Tensor, outputs: Tensors) -> None:
        """Write y, saved and, for a layer, the further outputs."""
        kind = f"moec_{self.engine.noun}_args"
        words = self._handles() | self._workspace(self.sizes.forward_workspace)
        if self.engine.desc.save != Save.NONE:
            words |= buffer("saved", saved)
        self._run("forward", filled(kind, self._around(kind) | {"y": y} | outputs, words))

    def backward(
        self, d_y: Tensor, d_logits: Tensor | None, saved: Tensor, grads: Tensors,
        d_factors: Sequence[Tensor | None], flags: GradFlags,
    ) -> None:
        """Write the gradients given by input names, and those of factors; absent ones are
        skipped."""
        noun = self.engine.noun
        kind, places = f"moec_{noun}_grad_args", _GRADIENTS[noun]
        tensors = {"d_y": d_y}
        words = self._handles() | buffer("saved", saved)
        if noun == "layer":
            forward = f"moec_{noun}_args"
            self.keep.append(filled(forward, self._around(forward), words))
            words = {"forward": int(self.keep[-1])}
            if d_logits is not None:
                tensors["d_logits_in"] = d_logits
        else:
            tensors |= self._around(kind)
        words |= self._workspace(self.sizes.backward_workspace)
        sets: dict[str, dict[str, Tensor]] = {}
        for name, grad in grads.items():
            of, field = places[name]
            if of is None:
                tensors[field] = grad
            else:
                sets.setdefault(of, {})[field] = grad
        for of, given in sets.items():
            words[of] = int(weight_set(given, self.keep, "d_"))
        wanted = [grad for grad in d_factors if grad is not None]
        if self.adapted is not None and wanted:
            self.keep.append(self.adapted.gradients(d_factors, wanted))
            words["d_adapters"] = int(self.keep[-1])
        self._run("backward", filled(kind, tensors, words, flags=int(flags)))


@lru_cache(maxsize=64)
def _router(desc: RouterDesc, context: Context) -> Router:
    return Router(context, desc)


def update_bias(desc: RouterDesc, counts: Tensor, bias: Tensor, rate: float) -> None:
    """Router.update_bias, on torch's stream and seen by autograd."""
    router = _router(desc, context_of(bias.device))
    router.update_bias(counts, bias, rate=rate, stream=current_stream(bias))
    torch.autograd.graph.increment_version(bias)
