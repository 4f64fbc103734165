# SPDX-License-Identifier: Apache-2.0
"""The operators torch.ops.moec.*: functional, traceable, with gradients.

    experts(...)            -> y, saved
    experts_backward(...)   -> gradients
    experts_accumulate(...) -> gradients; those of the matrices are added to main gradients
    layer(...)              -> y, logits, expert_ids, routing_weights, saved
    layer_backward(...), layer_accumulate(...)
    adapted_experts(...), adapted_layer(...) and their like: with a list of factors (_adapted)

Inputs are those of _spec, then main gradients (size 0: that matrix or bias has none) and the
settings: the spec's text, the save policy, the number of frozen weights and the offset of the
router's jitter (0 without). `saved` is empty with Save.NONE. Gradients come in the order of the
inputs that can have one; those that nobody wants are tensors of size 0, since an operator cannot
return None. Of a layer's outputs, y and logits are differentiable.

call() takes the way of _direct where it can, which gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._enums import GradFlags, Save
from .._spec import (
    EXPERTS_INPUTS,
    LAYER_INPUTS,
    REQUIRED,
    ROUTED_WEIGHTS,
    WITHOUT_GRADIENT,
)
from .._experts import Sizes
from .._tensors import kind_of
from . import _adapted
from ._direct import Moec, plain
from ._engine import Before, Call, Engine, engine_of, ep_of
from ._frozen import Numbered
from ._inputs import Given, autocast, main_gradients, refuse_devices
from ._layouts import compact, compact_matrix, empty_as, in_place
from ._structs import has_autocast

_SETTINGS = "str spec, int save, int frozen, SymInt rng_offset"
_NUM_SETTINGS = 4
_torch_library: Any = torch.library  # without types
_library = _torch_library.Library("moec", "FRAGMENT")

Settings = Sequence[Any]
"""spec, save, frozen, rng_offset"""


def _declare(names: Sequence[str]) -> str:
    return ", ".join(f"Tensor{'' if n in REQUIRED else '?'} {n}" for n in names)


def gradient_names(inputs: Sequence[str]) -> tuple[str, ...]:
    """The inputs that can have a gradient, in the order of a backward operator's results."""
    return tuple(n for n in inputs if n not in WITHOUT_GRADIENT)


def _ready(given: Given, in_place: Mapping[str, bool]) -> dict[str, Tensor]:
    """Inputs as the library wants them: compact but for the matrices it reads in place; routing
    weights in fp32."""
    made = {}
    for name, value in given.items():
        if name not in in_place and name not in _adapted.FACTORS:
            value = compact_matrix(name, value)
        made[name] = value.float() if name in ("routing_weights", "select_bias") else value
    return made


def _refuse_tangents(kernel: Any, keys: Any, *args: Any) -> Any:
    """torch's autograd kernel, where no tensor carries a tangent: that would get lost."""
    tangent_of: Any = forward_ad.unpack_dual
    if forward_ad._current_level >= 0 and any(
        isinstance(t, Tensor) and tangent_of(t).tangent is not None for t in args
    ):
        raise NotImplementedError(
            "moec.torch: forward-mode derivatives (torch.func.jvp, jacfwd, hessian and "
            "torch.autograd.forward_ad) are not implemented; those of torch.autograd are"
        )
    return kernel.call_boxed(keys, *args)


class _Kind:
    """The operators of experts or of a layer."""

    def __init__(self, name: str, inputs: tuple[str, ...], is_adapted: bool = False) -> None:
        self.name, self.inputs, self.is_adapted = name, inputs, is_adapted
        self.width = len(inputs) + is_adapted
        self.num_settings = _NUM_SETTINGS + is_adapted
        self.known = frozenset(inputs)
        self.required = tuple(n for n in inputs if n in REQUIRED)
        self.grads = gradient_names(inputs)
        self.is_layer = inputs is LAYER_INPUTS
        results = "Tensor, Tensor, Tensor, Tensor, Tensor" if self.is_layer else "Tensor, Tensor"
        tensors = _declare(inputs) + (", Tensor[] factors" if is_adapted else "")
        settings = _SETTINGS + (", str adapters" if is_adapted else "")
        factors = ["Tensor[]"] if is_adapted else []
        gradients = f"({', '.join(['Tensor' for _ in self.grads] + factors)})"
        back = f"Tensor d_y, Tensor? d_logits, Tensor saved, {tensors}"
        define = torch.library.custom_op
        self.forward = define(
            f"moec::{name}", self._forward, mutates_args=(),
            schema=f"({tensors}, Tensor[] main_grads, {settings}) -> ({results})",
        )
        self.backward = define(
            f"moec::{name}_backward", self._backward, mutates_args=(),
            schema=f"({back}, int want, {settings}) -> {gradients}",
        )
        self.accumulate = define(
            f"moec::{name}_accumulate", self._accumulate, mutates_args=("main_grads",),
            schema=f"({back}, Tensor(a!)[] main_grads, int want, {settings}) -> {gradients}",
        )
        self.forward.register_fake(self._forward_fake)
        self.backward.register_fake(self._backward_fake)
        self.accumulate.register_fake(self._accumulate_fake)
        self.forward.register_autograd(self._autograd, setup_context=self._setup)
        # The modules cast beforehand; this is for direct calls. torch's own rule
        # (register_autocast) would cast main gradients, which are added to, and routing weights.
        for device in ("cpu", "cuda"):
            _library.impl(name, partial(self._under_autocast, device), f"Autocast{device.upper()}")
        for operator in (name, f"{name}_backward", f"{name}_accumulate"):
            for key in ("AutogradCPU", "AutogradCUDA"):
                kernel = torch.library.get_kernel(f"moec::{operator}", key)
                _library.impl(operator, partial(_refuse_tangents, kernel), key, with_keyset=True)

    def _under_autocast(self, device: str, *args: Any) -> Any:
        count = self.width
        given = autocast(self._given(args[:count]), torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return self.forward(*self.in_order(given), *args[count:])

    def _given(self, values: Sequence[Tensor | None]) -> dict[str, Tensor]:
        count = len(self.inputs)
        given = {n: t for n, t in zip(self.inputs, values[:count], strict=True) if t is not None}
        for factors in values[count:]:
            given |= _adapted.named(factors)  # type: ignore[arg-type]
        return given

    def in_order(self, given: Given, count: int | None = None) -> list[Any]:
        """Values by name as arguments; of `count` factors, or of those that are given."""
        values: list[Any] = [given.get(name) for name in self.inputs]
        if self.is_adapted:
            there = sum(n in _adapted.FACTORS for n in given) if count is None else count
            values.append(_adapted.in_order(given, there))
        return values

    # ---- forward
    def _outputs(self, engine: Engine, x: Tensor, sizes: Sizes) -> list[Tensor]:
        desc, saved = engine.desc, sizes.saved
        size = 0 if desc.save == Save.NONE else saved.base + x.shape[0] * saved.per_token
        outputs = [x.new_empty(x.shape)]
        if self.is_layer:
            ids, tokens = desc.num_experts + desc.num_zero_experts, x.shape[0]
            outputs += [
                x.new_empty((tokens, ids), dtype=torch.float32),
                x.new_empty((tokens, desc.top_k), dtype=torch.int32),
                x.new_empty((tokens, desc.top_k), dtype=torch.float32),
            ]
        return [*outputs, x.new_empty((size,), dtype=torch.uint8)]

    def compute(self, given: Given, settings: Settings) -> tuple[tuple[Tensor, ...], Before]:
        """All outputs, and what the backward takes over."""
        call = self._call(_ready(given, in_place(given)), settings, None)
        outputs = self._outputs(call.engine, call.x, call.sizes)
        further = dict(zip(("logits", "expert_ids", "routing_weights"), outputs[1:-1],
                           strict=False))
        call.forward(outputs[0], outputs[-1], further)
        return tuple(outputs), Before(call.engine, call.plan)

    def _call(self, tensors: dict[str, Tensor], settings: Settings, before: Before | None) -> Call:
        spec, save, frozen, rng_offset, *adapters = settings
        before = before or Before(engine_of(spec, tensors["x"], save), None)
        return Call(before, tensors, Numbered.of(frozen, tensors), rng_offset, *adapters)

    def _forward(self, *args: Any) -> tuple[Tensor, ...]:
        values, settings = args[: self.width], args[-self.num_settings :]
        return self.compute(self._given(values), settings)[0]

    def _forward_fake(self, *args: Any) -> tuple[Tensor, ...]:
        spec, save, *_, adapters = args[-self.num_settings :]
        refuse_devices(self._given(args[: self.width]))
        engine = engine_of(spec, args[0], save)
        sizes = engine.sizes
        if self.is_adapted:
            sizes = engine.sizes_with(adapters, args[self.width - 1])
        return tuple(self._outputs(engine, args[0], sizes))

    # ---- backward
    def differentiate(
        self, given: Given, wanted: Sequence[str], main: Given, saved: Tensor, d_y: Tensor,
        d_logits: Tensor | None, settings: Settings, before: Before | None = None,
    ) -> dict[str, Tensor]:
        """The gradients of the inputs in `wanted`; those of matrices in `main` are added to it.
        before: of the forward, where it is there."""
        lies = in_place(given, as_rows=bool(main))
        found = _empty_gradients(given, wanted, lies)
        named = dict(found)
        weights = found.get("routing_weights")
        if weights is not None and weights.dtype != torch.float32:
            named["routing_weights"] = torch.empty_like(weights, dtype=torch.float32)
        flags = GradFlags.NONE
        if main:
            flags = GradFlags.ACCUMULATE
            # Only the matrices have main gradients; what else is a parameter starts from zero.
            for name, grad in named.items():
                if name not in ("x", "routing_weights", "router_x"):
                    grad.zero_()
            named |= main
        d_logits = None if d_logits is None else compact(d_logits)
        call = self._call(_ready(given, lies), settings, before)
        call.backward(compact(d_y), d_logits, saved, named, flags)
        if weights is not None and weights is not named["routing_weights"]:
            weights.copy_(named["routing_weights"])
        return found

    def _wanted(self, given: Given, want: int) -> list[str]:
        """The inputs of a set of bits; the last one is that of all factors."""
        factors = [n for n in given if n in _adapted.FACTORS] if want >> len(self.grads) else []
        return [n for i, n in enumerate(self.grads) if want >> i & 1 and n in given] + factors

    def _run(self, args: Sequence[Any], main_grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        d_y, d_logits, saved, *values = args[: 3 + self.width]
        want, *settings = args[-1 - self.num_settings :]
        given = self._given(values)
        main = main_gradients(given, main_grads) if main_grads else {}
        found = self.differentiate(given, self._wanted(given, want), main, saved, d_y, d_logits,
                                   settings)
        return self._results(found, given)

    def _results(self, found: Given, given: Given) -> tuple[Any, ...]:
        made: list[Any] = [found[n] if n in found else given["x"].new_empty((0,))
                           for n in self.grads]
        if self.is_adapted:
            made.append([t for n, t in found.items() if n in _adapted.FACTORS])
        return tuple(made)

    def _backward(self, *args: Any) -> tuple[Tensor, ...]:
        return self._run(args, ())

    def _backward_fake(self, *args: Any, as_rows: bool = False) -> tuple[Tensor, ...]:
        given = self._given(args[3 : 3 + self.width])
        around = zip(("d_y", "d_logits", "saved"), args, strict=False)
        refuse_devices(given | {n: t for n, t in around if t is not None})
        wanted = self._wanted(given, args[-1 - self.num_settings])
        return self._results(_empty_gradients(given, wanted, in_place(given, as_rows)), given)

    def _accumulate(self, *args: Any) -> tuple[Tensor, ...]:
        return self._run(args, args[3 + self.width])

    def _accumulate_fake(self, *args: Any) -> tuple[Tensor, ...]:
        return self._backward_fake(*args, as_rows=True)

    # ---- autograd
    def _setup(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, main_grads = inputs[: -self.num_settings]
        ctx.settings = inputs[-self.num_settings :]
        ctx.ep = ep_of(ctx.settings[0])
        factors = tensors.pop() if self.is_adapted else []
        # Not saved for backward: the next micro batch adds to them before this one's backward.
        ctx.main_grads = main_grads
        ctx.save_for_backward(output[-1], *tensors, *factors)
        ctx.set_materialize_grads(False)
        if self.is_layer:
            ctx.mark_non_differentiable(*output[2:4])

    def _autograd(self, ctx: Any, *d_outputs: Tensor | None) -> tuple[Any, ...]:
        saved, *values = ctx.saved_tensors
        count, given = len(self.inputs), values
        if self.is_adapted:
            given = [*values[:count], values[count:]]
        needs = list(self._given(ctx.needs_input_grad[: self.width]).items())
        found = self.gradients(self._given(given), [n for n, need in needs if need],
                               ctx.main_grads, saved, d_outputs, ctx.settings)
        empty_list: Any = [None] * len(ctx.main_grads)
        return (*self.in_order(found, len(values) - count), empty_list,
                *[None] * self.num_settings)

    def gradients(
        self, given: Given, needs: Sequence[str], main_grads: Sequence[Tensor], saved: Tensor,
        d_outputs: Sequence[Tensor | None], settings: Settings, before: Before | None = None,
    ) -> dict[str, Tensor]:
        """The gradients of the inputs that need one, but of those with a main gradient."""
        x = given["x"]
        d_y = torch.zeros_like(x) if d_outputs[0] is None else d_outputs[0]
        d_logits = d_outputs[1] if self.is_layer else None
        main = main_gradients(given, main_grads) if main_grads else {}
        main = {n: grad for n, grad in main.items() if n in needs}
        factors = [n for n in needs if n in _adapted.FACTORS]
        wanted = [n for n in self.grads if n in needs and n not in main] + factors
        # With create_graph it goes through the operators: they raise where it is differentiated.
        outer = (d_y, saved) if d_logits is None else (d_y, saved, d_logits)
        if not torch.is_grad_enabled() and plain((*outer, *given.values(), *main.values())):
            found = self.differentiate(given, wanted, main, saved, d_y, d_logits, settings,
                                       before)
            for grad in main.values():
                torch.autograd.graph.increment_version(grad)
            return found
        arguments = (d_y, d_logits, saved, *self.in_order(given))
        want = sum(1 << i for i, n in enumerate(self.grads) if n in wanted)
        want |= bool(factors) << len(self.grads)
        if main:
            mains = [main.get(n, x.new_empty((0,))) for n in ROUTED_WEIGHTS if n in given]
            grads = self.accumulate(*arguments, mains, want, *settings)
        else:
            grads = self.backward(*arguments, want, *settings)
        named = dict(zip(self.grads, grads, strict=False))
        if self.is_adapted:
            named |= _adapted.named(grads[-1])
        return {n: g for n, g in named.items() if n in wanted}


def _empty_gradients(
    given: Given, wanted: Sequence[str], lies: Mapping[str, bool]
) -> dict[str, Tensor]:
    """Memory for gradients, as the parameters lie."""
    return {n: _adapted.empty_gradient(given[n]) if n in _adapted.FACTORS
            else empty_as(given[n], given[n].dtype, lies.get(n, False)) for n in wanted}


EXPERTS = _Kind("experts", EXPERTS_INPUTS)
LAYER = _Kind("layer", LAYER_INPUTS)
_ADAPTED = {kind: _Kind(f"adapted_{kind.name}", kind.inputs, True) for kind in (EXPERTS, LAYER)}


def call(kind: _Kind, tensors: dict[str, Tensor | None], spec: str, save: Save, *,
         frozen: int = 0, rng_offset: int = 0, main_grads: Sequence[Tensor] = (),
         factors: Sequence[Tensor] = (), adapters: str = "") -> tuple[Tensor, ...]:
    """Run an operator without its last result; whether anything is saved is decided here.
    adapters: the text of the terms that the factors are of (_adapted.text_of)."""
    given = {n: t for n, t in tensors.items() if t is not None}
    _refuse(kind, given)
    if factors:
        given |= _adapted.named(factors)
        kind = _ADAPTED[kind]
    needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in given.values())
    if not needs_gradient:
        save = Save.NONE
    shape, device = given["x"].shape, given["x"].device.type
    for name in ("x", "router_x"):
        if name in given and given[name].dim() == 0:
            raise ValueError(f"moec.torch: {name} has 0 dimensions; at least 1 is needed")
        if name in given and given[name].dim() != 2:
            given[name] = given[name].reshape(-1, given[name].shape[-1])
    settings: Settings = (spec, int(save), frozen, rng_offset, *([adapters] if factors else []))
    if has_autocast(device):
        given = autocast(given, torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            y, *others = _outputs_of(kind, given, needs_gradient, list(main_grads), settings)
    else:
        y, *others = _outputs_of(kind, given, needs_gradient, list(main_grads), settings)
    return (y.view(shape) if len(shape) != 2 else y, *others)


def _refuse(kind: _Kind, given: Given) -> None:
    """Raise, naming the input, for what is missing, unknown or no tensor."""
    for name in kind.required:
        if name not in given:
            raise TypeError(f"moec.torch: {name} is None; a torch.Tensor is needed")
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"moec.torch: {name} is {kind_of(value)}; a torch.Tensor is needed"
            )
        if name not in kind.known:
            raise TypeError(f"moec.torch: no input {name!r}; {', '.join(kind.inputs)} exist")


def _outputs_of(kind: _Kind, given: dict[str, Tensor], needs_gradient: bool,
                main_grads: list[Tensor], settings: Settings) -> tuple[Tensor, ...]:
    """An operator's outputs without the last."""
    if not plain((*given.values(), *main_grads)):
        outputs: Any = kind.forward(*kind.in_order(given), main_grads, *settings)
        return tuple(outputs[:-1])
    if not needs_gradient:
        return kind.compute(given, settings)[0][:-1]
    made: Any = Moec.apply(kind, tuple(given), main_grads, settings, *given.values())
    return tuple(made)
