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
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._enums import GradFlags, Save
from .._spec import EXPERTS_INPUTS, LAYER_INPUTS, ROUTED_WEIGHTS, WITHOUT_GRADIENT
from ._engine import Call, Frozen, engine_of

_REQUIRED = {"x", "expert_ids", "routing_weights"}
_SETTINGS = "str spec, int save, int frozen, SymInt rng_offset"
_NUM_SETTINGS = 4
_torch_library: Any = torch.library  # without types
_library = _torch_library.Library("moec", "FRAGMENT")


def _declare(names: Sequence[str]) -> str:
    return ", ".join(f"Tensor{'' if n in _REQUIRED else '?'} {n}" for n in names)


def gradient_names(inputs: Sequence[str]) -> tuple[str, ...]:
    """The inputs that can have a gradient, in the order of a backward operator's results."""
    return tuple(n for n in inputs if n not in WITHOUT_GRADIENT)


def _ready(names: Sequence[str], values: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
    """Inputs as the library wants them: compact; routing weights in fp32."""
    made = {}
    for name, value in zip(names, values, strict=True):
        if value is not None:
            value = value.detach().contiguous()
            if name in ("routing_weights", "select_bias"):
                value = value.float()
        made[name] = value
    return made


def _refuse_tangents(kernel: Any, keys: Any, *args: Any) -> Any:
    """torch's autograd kernel, where no tensor carries a tangent: that would get lost."""
    tangent_of: Any = forward_ad.unpack_dual
    if forward_ad._current_level >= 0 and any(
        isinstance(t, Tensor) and tangent_of(t).tangent is not None for t in args
    ):
        raise NotImplementedError(
            "moec.torch: forward-mode derivatives (torch.func.jvp, jacfwd, hessian and "
            "torch.autograd.forward_ad) are not implemented; those of reverse mode are"
        )
    return kernel.call_boxed(keys, *args)


class _Kind:
    """The operators of experts or of a layer."""

    def __init__(self, name: str, inputs: tuple[str, ...]) -> None:
        self.name, self.inputs = name, inputs
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
        given = {n: t for n, t in zip(self.inputs, args[:count], strict=True) if t is not None}
        given = autocast(given, torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return self.forward(*(given.get(n) for n in self.inputs), *args[count:])

    # ---- forward
    def _outputs(self, x: Tensor, spec: str, save: int) -> list[Tensor]:
        engine = engine_of(spec, x, save)
        size = 0 if save == Save.NONE else engine.saved_bytes(x.shape[0])
        outputs = [x.new_empty(x.shape)]
        if self.is_layer:
            desc = engine.desc
            ids, tokens = desc.num_experts + desc.num_zero_experts, x.shape[0]
            outputs += [
                x.new_empty((tokens, ids), dtype=torch.float32),
                x.new_empty((tokens, desc.top_k), dtype=torch.int32),
                x.new_empty((tokens, desc.top_k), dtype=torch.float32),
            ]
        return [*outputs, x.new_empty((size,), dtype=torch.uint8)]

    def _forward(self, *args: Any) -> tuple[Tensor, ...]:
        *values, _, spec, save, frozen, rng_offset = args
        tensors = _ready(self.inputs, values)
        x = tensors["x"]
        assert x is not None
        outputs = self._outputs(x, spec, save)
        further = dict(zip(("logits", "expert_ids", "routing_weights"), outputs[1:-1],
                           strict=False))
        call = Call(engine_of(spec, x, save), tensors, Frozen.of(frozen, tensors), rng_offset)
        call.forward(outputs[0], outputs[-1], further)
        return tuple(outputs)

    def _forward_fake(self, *args: Any) -> tuple[Tensor, ...]:
        spec, save = args[-_NUM_SETTINGS:][:2]
        return tuple(self._outputs(args[0], spec, save))

    # ---- backward
    def _gradients(self, values: Sequence[Tensor | None], want: int) -> tuple[Tensor, ...]:
        """Memory for the gradients: empty where not wanted or where there is no input."""
        by_name = dict(zip(self.inputs, values, strict=True))
        x = by_name["x"]
        assert x is not None
        made = []
        for index, name in enumerate(self.grads):
            value = by_name[name]
            wanted = value is not None and want >> index & 1
            made.append(value.new_empty(value.shape) if wanted and value is not None
                        else x.new_empty((0,)))
        return tuple(made)

    def _run(self, args: Sequence[Any], main_grads: Sequence[Tensor] | None
             ) -> tuple[Tensor, ...]:
        d_y, d_logits, saved, *values = args[: 3 + len(self.inputs)]
        want, spec, save, frozen, rng_offset = args[-1 - _NUM_SETTINGS :]
        grads = self._gradients(values, want)
        tensors = _ready(self.inputs, values)
        x = tensors["x"]
        assert x is not None
        named = {n: g for i, (n, g) in enumerate(zip(self.grads, grads, strict=True))
                 if want >> i & 1 and tensors[n] is not None}
        weights = named.get("routing_weights")
        if weights is not None and weights.dtype != torch.float32:
            named["routing_weights"] = weights.float()
        flags = GradFlags.NONE
        if main_grads is not None:
            flags = GradFlags.ACCUMULATE
            # Only the matrices have main gradients; what else is a parameter starts from zero.
            for name, grad in named.items():
                if name not in ("x", "routing_weights", "router_x"):
                    grad.zero_()
            named |= main_gradients(tensors, main_grads)
        call = Call(engine_of(spec, x, save), tensors, Frozen.of(frozen, tensors), rng_offset)
        d_logits = None if d_logits is None else d_logits.detach().contiguous()
        call.backward(d_y.detach().contiguous(), d_logits, saved, named, flags)
        if weights is not None and weights is not named["routing_weights"]:
            weights.copy_(named["routing_weights"])
        return grads

    def _backward(self, *args: Any) -> tuple[Tensor, ...]:
        return self._run(args, None)

    def _backward_fake(self, *args: Any) -> tuple[Tensor, ...]:
        return self._gradients(args[3 : 3 + len(self.inputs)], args[-1 - _NUM_SETTINGS])

    def _accumulate(self, *args: Any) -> tuple[Tensor, ...]:
        return self._run(args, args[3 + len(self.inputs)])

    def _accumulate_fake(self, *args: Any) -> tuple[Tensor, ...]:
        return self._backward_fake(*args)

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

    def _autograd(self, ctx: Any, d_y: Tensor | None, *others: Tensor | None) -> tuple[Any, ...]:
        saved, *tensors = ctx.saved_tensors
        x = tensors[0]
        given = dict(zip(self.inputs, tensors, strict=True))
        needs = dict(zip(self.inputs, ctx.needs_input_grad, strict=False))
        in_main = main_gradients(given, ctx.main_grads) if ctx.main_grads else {}
        in_main = {n: main for n, main in in_main.items() if needs[n]}
        want = sum(1 << i for i, n in enumerate(self.grads) if needs[n] and n not in in_main)
        d_y = torch.zeros_like(x) if d_y is None else d_y
        d_logits = others[0] if self.is_layer else None
        if in_main:
            mains = [in_main.get(n, x.new_empty((0,))) for n in ROUTED_WEIGHTS
                     if given[n] is not None]
            grads = self.accumulate(d_y, d_logits, saved, *tensors, mains, want, *ctx.settings)
        else:
            grads = self.backward(d_y, d_logits, saved, *tensors, want, *ctx.settings)
        found = {n: g for i, (n, g) in enumerate(zip(self.grads, grads, strict=True))
                 if want >> i & 1}
        empty_list: Any = [None] * len(ctx.main_grads)
        return (*(found.get(n) for n in self.inputs), empty_list, *[None] * _NUM_SETTINGS)


def main_gradients(
    tensors: dict[str, Tensor | None], main_grads: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Main gradients by name: one for each routed matrix or bias that is given, in order, without
    those of size 0. Raises ValueError unless each is compact and of the parameter's shape."""
    given = {n: t for n in ROUTED_WEIGHTS if (t := tensors[n]) is not None}
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
    unknown = [name for name in given if name not in kind.inputs]
    if unknown:
        raise TypeError(f"moec.torch: no input {unknown[0]!r}; {', '.join(kind.inputs)} exist")
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in given.values()):
        save = Save.NONE
    shape, device = given["x"].shape, given["x"].device.type
    for name in ("x", "router_x"):
        if name in given and given[name].dim() != 2:
            given[name] = given[name].reshape(-1, given[name].shape[-1])
    settings = list(main_grads), spec, int(save), frozen, rng_offset
    if has_autocast(device):
        given = autocast(given, torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            y, *others, _ = kind.forward(*(given.get(n) for n in kind.inputs), *settings)
    else:
        y, *others, _ = kind.forward(*(given.get(n) for n in kind.inputs), *settings)
    return (y.view(shape) if len(shape) != 2 else y, *others)


def has_autocast(device: str) -> bool:
    """Whether autocast is on for a type of device; torch raises for those that have none."""
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


def autocast(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Under autocast x and the matrices go to its type, as those of a linear layer do; what
    decides about routing to fp32."""
    routing = {"routing_weights", "select_bias", "per_expert_scale", "gate_bias", "input_scale"}
    return {n: t.to(torch.float32 if n in routing else dtype) if t.is_floating_point() else t
            for n, t in tensors.items()}
