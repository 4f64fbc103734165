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
from ._direct import Moec, plain
from ._engine import Before, Call, Engine, engine_of, ep_of
from ._frozen import Numbered
from ._inputs import Given, autocast, main_gradients, refuse, refuse_devices
from ._layouts import are_compact, compact, compact_matrix, empty_as, in_place
from ._structs import has_autocast

_SETTINGS = "str spec, int save, int frozen, SymInt rng_offset"
_NUM_SETTINGS = 4
_torch_library: Any = torch.library  # without types
_library = _torch_library.Library("moec", "FRAGMENT")

Settings = Sequence[Any]
"""spec, save, frozen, rng_offset, and the text of adapters where there are some"""
Wanted = tuple[Sequence[str], Sequence[bool]]
"""the inputs whose gradients are wanted, and whether that of each factor is"""
Found = tuple[dict[str, Tensor], Sequence[Tensor | None]]
"""gradients of inputs by name, and of all factors"""


def _declare(names: Sequence[str]) -> str:
    return ", ".join(f"Tensor{'' if n in REQUIRED else '?'} {n}" for n in names)


def gradient_names(inputs: Sequence[str]) -> tuple[str, ...]:
    """The inputs that can have a gradient, in the order of a backward operator's results."""
    return tuple(n for n in inputs if n not in WITHOUT_GRADIENT)


def _ready(given: Given, in_place: Mapping[str, bool]) -> dict[str, Tensor]:
    """Inputs as the library wants them: compact but for the matrices it reads in place; routing
    weights in fp32."""
    if are_compact(given.values()):
        made = dict(given)
    else:
        made = {n: t if n in in_place else compact_matrix(n, t) for n, t in given.items()}
    for name in ("routing_weights", "select_bias"):
        if name in made:
            made[name] = made[name].float()
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
        self.required = self.known & REQUIRED
        self.grads = gradient_names(inputs)
        self.can_differ = frozenset(self.grads)
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
        given, factors = self._given(args[:count])
        given = autocast(given, torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return self.forward(*self.in_order(given, factors), *args[count:])

    def _given(self, values: Sequence[Any]) -> tuple[dict[str, Any], Sequence[Any]]:
        """Of arguments, or of what is said about each: the inputs by name, and the factors."""
        given = {n: t for n, t in zip(self.inputs, values, strict=False) if t is not None}
        return given, values[-1] if self.is_adapted else ()

    def in_order(self, given: Mapping[str, Any], factors: Sequence[Any]) -> list[Any]:
        """Values by name, and factors, as arguments."""
        return [*map(given.get, self.inputs), *([list(factors)] if self.is_adapted else [])]

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

    def compute(
        self, given: Given, factors: Sequence[Tensor], settings: Settings
    ) -> tuple[tuple[Tensor, ...], Before]:
        """All outputs, and what the backward takes over."""
        call = self._call(_ready(given, in_place(given)), factors, settings, None)
        outputs = self._outputs(call.engine, call.x, call.sizes)
        further = dict(zip(("logits", "expert_ids", "routing_weights"), outputs[1:-1],
                           strict=False))
        call.forward(outputs[0], outputs[-1], further)
        return tuple(outputs), Before(call.engine, call.plan)

    def _call(
        self, tensors: dict[str, Tensor], factors: Sequence[Tensor], settings: Settings,
        before: Before | None,
    ) -> Call:
        spec, save, frozen, rng_offset, *adapters = settings
        before = before or Before(engine_of(spec, tensors["x"], save), None)
        return Call(before, tensors, factors, Numbered.of(frozen, tensors), rng_offset, *adapters)

    def _forward(self, *args: Any) -> tuple[Tensor, ...]:
        values, settings = args[: self.width], args[-self.num_settings :]
        return self.compute(*self._given(values), settings)[0]

    def _forward_fake(self, *args: Any) -> tuple[Tensor, ...]:
        spec, save, *_, adapters = args[-self.num_settings :]
        refuse_devices(*self._given(args[: self.width]))
        engine = engine_of(spec, args[0], save)
        sizes = engine.sizes
        if self.is_adapted:
            sizes = engine.sizes_with(adapters, args[self.width - 1])
        return tuple(self._outputs(engine, args[0], sizes))

    # ---- backward
    def differentiate(
        self, given: Given, factors: Sequence[Tensor], wanted: Wanted, main: Given, saved: Tensor,
        d_y: Tensor, d_logits: Tensor | None, settings: Settings, before: Before | None = None,
    ) -> Found:
        """The gradients in `wanted`; those of matrices in `main` are added to it. before: of the
        forward, where it is there."""
        lies = in_place(given, as_rows=bool(main))
        found, d_factors = _empty_gradients(given, factors, wanted, lies)
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
            for one in d_factors:
                if one is not None:
                    one.zero_()
            named |= main
        d_logits = None if d_logits is None else compact(d_logits)
        call = self._call(_ready(given, lies), factors, settings, before)
        call.backward(compact(d_y), d_logits, saved, named, d_factors, flags)
        if weights is not None and weights is not named["routing_weights"]:
            weights.copy_(named["routing_weights"])
        return found, d_factors

    def _wanted(self, given: Given, factors: Sequence[Tensor], want: int) -> Wanted:
        """A set of bits; the last one is that of all factors."""
        return ([n for i, n in enumerate(self.grads) if want >> i & 1 and n in given],
                [bool(want >> len(self.grads))] * len(factors))

    def _run(self, args: Sequence[Any], main_grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        d_y, d_logits, saved, *values = args[: 3 + self.width]
        want, *settings = args[-1 - self.num_settings :]
        given, factors = self._given(values)
        main = main_gradients(given, main_grads) if main_grads else {}
        found = self.differentiate(given, factors, self._wanted(given, factors, want), main, saved,
                                   d_y, d_logits, settings)
        return self._results(found, given)

    def _results(self, found: Found, given: Given) -> tuple[Any, ...]:
        grads, d_factors = found
        made: list[Any] = [grads[n] if n in grads else given["x"].new_empty((0,))
                           for n in self.grads]
        if self.is_adapted:
            made.append([one for one in d_factors if one is not None])
        return tuple(made)

    def _backward(self, *args: Any) -> tuple[Tensor, ...]:
        return self._run(args, ())

    def _backward_fake(self, *args: Any, as_rows: bool = False) -> tuple[Tensor, ...]:
        given, factors = self._given(args[3 : 3 + self.width])
        around = zip(("d_y", "d_logits", "saved"), args, strict=False)
        refuse_devices(given | {n: t for n, t in around if t is not None}, factors)
        wanted = self._wanted(given, factors, args[-1 - self.num_settings])
        lies = in_place(given, as_rows)
        return self._results(_empty_gradients(given, factors, wanted, lies), given)

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
        count, arguments = len(self.inputs), values
        if self.is_adapted:
            arguments = [*values[:count], values[count:]]
        needs, factor_needs = self._given(ctx.needs_input_grad[: self.width])
        wanted = [n for n, need in needs.items() if need], factor_needs
        found = self.gradients(*self._given(arguments), wanted, ctx.main_grads, saved, d_outputs,
                               ctx.settings)
        empty_list: Any = [None] * len(ctx.main_grads)
        return (*self.in_order(*found), empty_list, *[None] * self.num_settings)

    def gradients(
        self, given: Given, factors: Sequence[Tensor], wanted: Wanted,
        main_grads: Sequence[Tensor], saved: Tensor, d_outputs: Sequence[Tensor | None],
        settings: Settings, before: Before | None = None,
    ) -> Found:
        """The gradients that are wanted, but of inputs with a main gradient."""
        x, (names, needs) = given["x"], wanted
        d_y = torch.zeros_like(x) if d_outputs[0] is None else d_outputs[0]
        d_logits = d_outputs[1] if self.is_layer else None
        main = main_gradients(given, main_grads) if main_grads else {}
        main = {n: grad for n, grad in main.items() if n in names}
        names = [n for n in names if n in self.can_differ and n not in main]
        # With create_graph it goes through the operators: they raise where it is differentiated.
        outer = (d_y, saved) if d_logits is None else (d_y, saved, d_logits)
        if not torch.is_grad_enabled() and plain(
                (*outer, *given.values(), *factors, *main.values())):
            found = self.differentiate(given, factors, (names, needs), main, saved, d_y, d_logits,
                                       settings, before)
            for grad in main.values():
                torch.autograd.graph.increment_version(grad)
            return found
        arguments = (d_y, d_logits, saved, *self.in_order(given, factors))
        want = sum(1 << i for i, n in enumerate(self.grads) if n in names)
        want |= any(needs) << len(self.grads)
        if main:
            mains = [main.get(n, x.new_empty((0,))) for n in ROUTED_WEIGHTS if n in given]
            grads = self.accumulate(*arguments, mains, want, *settings)
        else:
            grads = self.backward(*arguments, want, *settings)
        d_factors = grads[-1] if any(needs) else [None] * len(needs)
        return ({n: g for n, g in zip(self.grads, grads, strict=False) if n in names},
                [one if need else None for one, need in zip(d_factors, needs, strict=True)])


def _empty_gradients(
    given: Given, factors: Sequence[Tensor], wanted: Wanted, lies: Mapping[str, bool]
) -> Found:
    """Memory for gradients, as the parameters lie; PEFT's storage of factors keeps its strides."""
    names, needs = wanted
    return ({n: empty_as(given[n], given[n].dtype, lies.get(n, False)) for n in names},
            [torch.empty_like(t) if need else None
             for t, need in zip(factors, needs, strict=True)])


EXPERTS = _Kind("experts", EXPERTS_INPUTS)
LAYER = _Kind("layer", LAYER_INPUTS)
_ADAPTED = {kind: _Kind(f"adapted_{kind.name}", kind.inputs, True) for kind in (EXPERTS, LAYER)}


def call(kind: _Kind, tensors: dict[str, Tensor | None], spec: str, save: Save, *,
         frozen: int = 0, rng_offset: int = 0, main_grads: Sequence[Tensor] = (),
         factors: Sequence[Tensor] = (), adapters: str = "") -> tuple[Tensor, ...]:
    """Run an operator without its last result; whether anything is saved is decided here.
    adapters: the text of the terms that the factors are of (_adapted.text_of)."""
    given = {n: t for n, t in tensors.items() if t is not None}
    is_plain = plain((*given.values(), *factors, *main_grads))
    if not is_plain or not kind.required <= given.keys() <= kind.known:
        refuse(kind.inputs, given)
    settings: Settings = (spec, int(save), frozen, rng_offset)
    if factors:
        kind, settings = _ADAPTED[kind], (*settings, adapters)
    x = given["x"]
    shape, device = x.shape, x.device.type
    for name in ("x", "router_x"):
        if name in given and given[name].dim() != 2:
            if given[name].dim() == 0:
                raise ValueError(f"moec.torch: {name} has 0 dimensions; at least 1 is needed")
            given[name] = given[name].reshape(-1, given[name].shape[-1])
    if has_autocast(device):
        given = autocast(given, torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            y, *others = _outputs_of(kind, given, factors, main_grads, settings, is_plain)
    else:
        y, *others = _outputs_of(kind, given, factors, main_grads, settings, is_plain)
    return (y.view(shape) if len(shape) != 2 else y, *others)


def _outputs_of(kind: _Kind, given: dict[str, Tensor], factors: Sequence[Tensor],
                main_grads: Sequence[Tensor], settings: Settings, is_plain: bool
                ) -> tuple[Tensor, ...]:
    """An operator's outputs without the last. Where no gradient is needed nothing is saved."""
    values = (*given.values(), *factors)
    needs_gradient = torch.is_grad_enabled() and any([t.requires_grad for t in values])
    if not needs_gradient:
        settings = (settings[0], int(Save.NONE), *settings[2:])
    if not is_plain:
        outputs: Any = kind.forward(*kind.in_order(given, factors), list(main_grads), *settings)
        return tuple(outputs[:-1])
    if not needs_gradient:
        return kind.compute(given, factors, settings)[0][:-1]
    made: Any = Moec.apply(kind, tuple(given), main_grads, settings, *values)
    return tuple(made)
