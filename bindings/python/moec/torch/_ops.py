# SPDX-License-Identifier: Apache-2.0
"""The operators torch.ops.moec.*: functional, traceable, with gradients.

    experts(...)            -> y, saved
    experts_backward(...)   -> gradients
    experts_accumulate(...) -> gradients; those of the matrices are added to main gradients
    layer(...)              -> y, logits, expert_ids, routing_weights, saved
    layer_backward(...), layer_accumulate(...)

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
    SHARED_WEIGHTS,
    WITHOUT_GRADIENT,
)
from .._tensors import kind_of
from ._direct import Moec, plain
from ._engine import Call, Engine, Numbered, Plan, engine_of
from ._layouts import compact, compact_matrix, empty_as, in_place
from ._structs import has_autocast

_SETTINGS = "str spec, int save, int frozen, SymInt rng_offset"
_NUM_SETTINGS = 4
_torch_library: Any = torch.library  # without types
_library = _torch_library.Library("moec", "FRAGMENT")

Given = Mapping[str, Tensor]
"""the inputs of a call, by name"""
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
        if name not in in_place:
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

    def __init__(self, name: str, inputs: tuple[str, ...]) -> None:
        self.name, self.inputs = name, inputs
        self.required = tuple(n for n in inputs if n in REQUIRED)
        self.grads = gradient_names(inputs)
        self.is_layer = inputs is LAYER_INPUTS
        results = "Tensor, Tensor, Tensor, Tensor, Tensor" if self.is_layer else "Tensor, Tensor"
        tensors = _declare(inputs)
        gradients = f"({', '.join('Tensor' for _ in self.grads)})"
        back = f"Tensor d_y, Tensor? d_logits, Tensor saved, {tensors}"
        define = torch.library.custom_op
        self.forward = define(
            f"moec::{name}", self._forward, mutates_args=(),
            schema=f"({tensors}, Tensor[] main_grads, {_SETTINGS}) -> ({results})",
        )
        self.backward = define(
            f"moec::{name}_backward", self._backward, mutates_args=(),
            schema=f"({back}, int want, {_SETTINGS}) -> {gradients}",
        )
        self.accumulate = define(
            f"moec::{name}_accumulate", self._accumulate, mutates_args=("main_grads",),
            schema=f"({back}, Tensor(a!)[] main_grads, int want, {_SETTINGS}) -> {gradients}",
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
        count = len(self.inputs)
        given = autocast(self._given(args[:count]), torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return self.forward(*self.in_order(given), *args[count:])

    def _given(self, values: Sequence[Tensor | None]) -> dict[str, Tensor]:
        return {n: t for n, t in zip(self.inputs, values, strict=True) if t is not None}

    def in_order(self, given: Given) -> list[Tensor | None]:
        return [given.get(name) for name in self.inputs]

    # ---- forward
    def _outputs(self, engine: Engine, x: Tensor) -> list[Tensor]:
        desc = engine.desc
        size = 0 if desc.save == Save.NONE else engine.saved_bytes(x.shape[0])
        outputs = [x.new_empty(x.shape)]
        if self.is_layer:
            ids, tokens = desc.num_experts + desc.num_zero_experts, x.shape[0]
            outputs += [
                x.new_empty((tokens, ids), dtype=torch.float32),
                x.new_empty((tokens, desc.top_k), dtype=torch.int32),
                x.new_empty((tokens, desc.top_k), dtype=torch.float32),
            ]
        return [*outputs, x.new_empty((size,), dtype=torch.uint8)]

    def compute(self, given: Given, settings: Settings) -> tuple[tuple[Tensor, ...], Plan | None]:
        """All outputs, and the plan of experts."""
        call = self._call(_ready(given, in_place(given)), settings, None)
        outputs = self._outputs(call.engine, call.x)
        further = dict(zip(("logits", "expert_ids", "routing_weights"), outputs[1:-1],
                           strict=False))
        call.forward(outputs[0], outputs[-1], further)
        return tuple(outputs), call.plan

    def _call(self, tensors: dict[str, Tensor], settings: Settings, plan: Plan | None) -> Call:
        spec, save, frozen, rng_offset = settings
        return Call(engine_of(spec, tensors["x"], save), tensors, Numbered.of(frozen, tensors),
                    rng_offset, plan)

    def _forward(self, *args: Any) -> tuple[Tensor, ...]:
        values, settings = args[: len(self.inputs)], args[-_NUM_SETTINGS:]
        return self.compute(self._given(values), settings)[0]

    def _forward_fake(self, *args: Any) -> tuple[Tensor, ...]:
        spec, save = args[-_NUM_SETTINGS:][:2]
        refuse_devices(self._given(args[: len(self.inputs)]))
        return tuple(self._outputs(engine_of(spec, args[0], save), args[0]))

    # ---- backward
    def differentiate(
        self, given: Given, wanted: Sequence[str], main: Given, saved: Tensor, d_y: Tensor,
        d_logits: Tensor | None, settings: Settings, plan: Plan | None = None,
    ) -> dict[str, Tensor]:
        """The gradients of the inputs in `wanted`; those of matrices in `main` are added to it.
        plan: the forward's, where it is there."""
        lies = in_place(given, as_rows=bool(main))
        found = {name: empty_as(given[name], given[name].dtype, lies.get(name, False))
                 for name in wanted}
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
        call = self._call(_ready(given, lies), settings, plan)
        call.backward(compact(d_y), d_logits, saved, named, flags)
        if weights is not None and weights is not named["routing_weights"]:
            weights.copy_(named["routing_weights"])
        return found

    def _wanted(self, given: Given, want: int) -> list[str]:
        return [n for i, n in enumerate(self.grads) if want >> i & 1 and n in given]

    def _run(self, args: Sequence[Any], main_grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        d_y, d_logits, saved, *values = args[: 3 + len(self.inputs)]
        want, *settings = args[-1 - _NUM_SETTINGS :]
        given = self._given(values)
        main = main_gradients(given, main_grads) if main_grads else {}
        found = self.differentiate(given, self._wanted(given, want), main, saved, d_y, d_logits,
                                   settings)
        return self._results(found, given)

    def _results(self, found: Given, given: Given) -> tuple[Tensor, ...]:
        return tuple(found[n] if n in found else given["x"].new_empty((0,)) for n in self.grads)

    def _backward(self, *args: Any) -> tuple[Tensor, ...]:
        return self._run(args, ())

    def _backward_fake(self, *args: Any, as_rows: bool = False) -> tuple[Tensor, ...]:
        given = self._given(args[3 : 3 + len(self.inputs)])
        around = zip(("d_y", "d_logits", "saved"), args, strict=False)
        refuse_devices(given | {n: t for n, t in around if t is not None})
        wanted = self._wanted(given, args[-1 - _NUM_SETTINGS])
        lies = in_place(given, as_rows)
        return self._results(
            {n: empty_as(given[n], given[n].dtype, lies.get(n, False)) for n in wanted}, given
        )

    def _accumulate(self, *args: Any) -> tuple[Tensor, ...]:
        return self._run(args, args[3 + len(self.inputs)])

    def _accumulate_fake(self, *args: Any) -> tuple[Tensor, ...]:
        return self._backward_fake(*args, as_rows=True)

    # ---- autograd
    def _setup(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, main_grads = inputs[:-_NUM_SETTINGS]
        ctx.settings = inputs[-_NUM_SETTINGS:]
        # Not saved for backward: the next micro batch adds to them before this one's backward.
        ctx.main_grads = main_grads
        ctx.save_for_backward(output[-1], *tensors)
        ctx.set_materialize_grads(False)
        if self.is_layer:
            ctx.mark_non_differentiable(*output[2:4])

    def _autograd(self, ctx: Any, *d_outputs: Tensor | None) -> tuple[Any, ...]:
        saved, *values = ctx.saved_tensors
        needs = [n for n, need in zip(self.inputs, ctx.needs_input_grad, strict=False) if need]
        found = self.gradients(self._given(values), needs, ctx.main_grads, saved, d_outputs,
                               ctx.settings)
        empty_list: Any = [None] * len(ctx.main_grads)
        return (*self.in_order(found), empty_list, *[None] * _NUM_SETTINGS)

    def gradients(
        self, given: Given, needs: Sequence[str], main_grads: Sequence[Tensor], saved: Tensor,
        d_outputs: Sequence[Tensor | None], settings: Settings, plan: Plan | None = None,
    ) -> dict[str, Tensor]:
        """The gradients of the inputs that need one, but of those with a main gradient."""
        x = given["x"]
        d_y = torch.zeros_like(x) if d_outputs[0] is None else d_outputs[0]
        d_logits = d_outputs[1] if self.is_layer else None
        main = main_gradients(given, main_grads) if main_grads else {}
        main = {n: grad for n, grad in main.items() if n in needs}
        wanted = [n for n in self.grads if n in needs and n not in main]
        # With create_graph it goes through the operators: they raise where it is differentiated.
        if not torch.is_grad_enabled() and plain((d_y, d_logits, saved, *given.values(),
                                                  *main.values())):
            found = self.differentiate(given, wanted, main, saved, d_y, d_logits, settings,
                                       plan)
            for grad in main.values():
                torch.autograd.graph.increment_version(grad)
            return found
        arguments = (d_y, d_logits, saved, *self.in_order(given))
        want = sum(1 << i for i, n in enumerate(self.grads) if n in wanted)
        if main:
            mains = [main.get(n, x.new_empty((0,))) for n in ROUTED_WEIGHTS if n in given]
            grads = self.accumulate(*arguments, mains, want, *settings)
        else:
            grads = self.backward(*arguments, want, *settings)
        return {n: g for n, g in zip(self.grads, grads, strict=True) if n in wanted}


def refuse_devices(given: Given) -> None:
    """Raise where one is not on x's device: with one on meta, kernels would run on none."""
    device = given["x"].device
    for name, tensor in given.items():
        if tensor.device != device:
            raise RuntimeError(
                f"moec.torch: {name} is on {tensor.device}, x on {device}; one device is needed"
            )


def main_gradients(tensors: Given, main_grads: Sequence[Tensor]) -> dict[str, Tensor]:
    """Main gradients by name: one for each routed matrix or bias that is given, in order, without
    those of size 0. Raises ValueError unless each is compact and of the parameter's shape."""
    given = {n: tensors[n] for n in ROUTED_WEIGHTS if n in tensors}
    if len(given) != len(main_grads):
        raise ValueError(f"moec.torch: {len(main_grads)} main gradients for {', '.join(given)}")
    found = {n: main for n, main in zip(given, main_grads, strict=True) if main.numel()}
    for name, main in found.items():
        if main.shape != given[name].shape or not main.is_contiguous():
            raise ValueError(
                f"moec.torch: the main gradient of {name} has the shape {list(main.shape)} and the "
                f"strides {list(main.stride())}; contiguous {list(given[name].shape)} is needed"
            )
    return found


EXPERTS = _Kind("experts", EXPERTS_INPUTS)
LAYER = _Kind("layer", LAYER_INPUTS)


def call(kind: _Kind, tensors: dict[str, Tensor | None], spec: str, save: Save, *,
         frozen: int = 0, rng_offset: int = 0, main_grads: Sequence[Tensor] = ()
         ) -> tuple[Tensor, ...]:
    """Run an operator without its last result; whether anything is saved is decided here."""
    given = {n: t for n, t in tensors.items() if t is not None}
    _refuse(kind, given)
    needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in given.values())
    if not needs_gradient:
        save = Save.NONE
    shape, device = given["x"].shape, given["x"].device.type
    for name in ("x", "router_x"):
        if name in given and given[name].dim() == 0:
            raise ValueError(f"moec.torch: {name} has 0 dimensions; at least 1 is needed")
        if name in given and given[name].dim() != 2:
            given[name] = given[name].reshape(-1, given[name].shape[-1])
    settings = spec, int(save), frozen, rng_offset
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
        if name not in kind.inputs:
            raise TypeError(f"moec.torch: no input {name!r}; {', '.join(kind.inputs)} exist")


def _outputs_of(kind: _Kind, given: dict[str, Tensor], needs_gradient: bool,
                main_grads: list[Tensor], settings: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """An operator's outputs without the last."""
    if not plain((*given.values(), *main_grads)):
        outputs: Any = kind.forward(*kind.in_order(given), main_grads, *settings)
        return tuple(outputs[:-1])
    if not needs_gradient:
        return kind.compute(given, settings)[0][:-1]
    made: Any = Moec.apply(kind, tuple(given), main_grads, settings, *given.values())
    return tuple(made)


def autocast(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Under autocast x and the matrices go to its type, as those of a linear layer do; what
    decides about routing to fp32. Experts in fp32 stay: products beside x round their matrices,
    which are the values of a cast, and add their biases as they are."""
    kept = {"routing_weights", "select_bias", "per_expert_scale", "gate_bias", "input_scale"}
    for names in (ROUTED_WEIGHTS, SHARED_WEIGHTS):
        if all(tensors[n].dtype == torch.float32 for n in names if n in tensors):
            kept.update(names)
    return {n: t.to(torch.float32 if n in kept else dtype) if t.is_floating_point() else t
            for n, t in tensors.items()}
