# SPDX-License-Identifier: Apache-2.0
"""nn.Modules over the operators: the experts alone, and the whole layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .._descriptors import ExpertsDesc, RouterDesc
from .._enums import GateLayout, Orientation, RouterFlags, RouterInput, Save, Shared
from .._spec import ROUTED_WEIGHTS, SHARED_WEIGHTS, Spec
from .._tensors import kind_of, numpy_dtype
from .._weights import MATRICES, WEIGHTS
from ..matrices import Matrices
from . import _ops, _parallel
from ._codes import number
from ._constants import traceable
from ._engine import update_bias
from ._eps import EP
from ._frozen import Frozen
from ._lora import AdaptedModule
from ._main_grads import complete_main_grads, new_main_grad
from ._packed import PackedTensor
from ._packed_weights import packed_number, put_packed

_ROUTED = dict(zip(WEIGHTS, ROUTED_WEIGHTS, strict=True))
_SHARED = dict(zip(WEIGHTS, SHARED_WEIGHTS, strict=True))


class Routing(NamedTuple):
    """What MoELayer decided about each token."""

    logits: Tensor
    """[T,E+Z] f32, differentiable: auxiliary losses start here"""
    expert_ids: Tensor
    """[T,K] i32; -1 = none"""
    routing_weights: Tensor
    """[T,K] f32, not differentiable: gradients start at the logits only"""

    def counts(self) -> Tensor:
        """[E+Z] i32: how many slots chose each expert. Nothing waits for the device."""
        ids = self.expert_ids.flatten().long()
        found = ids.new_zeros(self.logits.shape[-1], dtype=torch.int32)
        return found.index_add_(0, ids.clamp(min=0), (ids >= 0).int())


def _rows(layout: GateLayout, inter: int) -> dict[str, int]:
    """Rows N of each matrix that a layout has before `down`."""
    if layout == GateLayout.SPLIT:
        return {"gate": inter, "up": inter}
    return {"up": inter} if layout == GateLayout.NONE else {"gate_up": 2 * inter}


class _Base(AdaptedModule):
    """Parameters of the experts, and the call."""

    def __init__(
        self, spec: Spec, *, bias: bool, output_bias: bool, save: Save,
        dtype: torch.dtype | None, device: Any, codes: Matrices | None, ep: EP | None,
        packed: Mapping[str, PackedTensor] | None,
    ) -> None:
        super().__init__()
        desc = spec.experts
        self.desc, self.save, self.ep = desc, save, ep
        self._spec, self._text = spec, spec.text()
        self._frozen: Frozen | None = None
        self._main: torch.dtype | None = None
        dtype = dtype or getattr(torch, numpy_dtype(desc.dtype).name)
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        gate_up = spec.gate_up_orientation == Orientation.IN_OUT
        down = spec.down_orientation == Orientation.IN_OUT
        sets = [(1, spec.shared_gate_layout, desc.shared_inter, _SHARED)]
        sets = sets if desc.shared != Shared.NONE else []
        if codes is None:
            held = desc.expert_end - desc.expert_begin or desc.num_experts
            sets.insert(0, (held, spec.gate_layout, desc.inter, _ROUTED))
        for count, layout, inter, names in sets:
            if names is _SHARED:  # always as nn.Linear has them
                gate_up = down = False
            rows = {n: (size, desc.hidden, gate_up) for n, size in _rows(layout, inter).items()}
            for name, (n, k, is_in_out) in (rows | {"down": (desc.hidden, inter, down)}).items():
                self._parameter(names[name], (count, k, n) if is_in_out else (count, n, k), options)
                if bias and names is not _SHARED:
                    self._parameter(names[f"{name}_bias"], (count, n), options)
        if desc.shared in (Shared.SIGMOID_GATE, Shared.SOFTMAX2):
            self._parameter("shared_gate", (desc.shared - 1, desc.hidden), options)
        if desc.shared == Shared.SOFTMAX2:
            self._parameter("shared_gate_bias", (2,), options)
        if output_bias:
            self._parameter("output_bias", (desc.hidden,), options)
        if codes is not None:
            self._hold(codes, device, "experts." if spec.router else "")
        self._is_packed = bool(packed)
        for name, matrix in (packed or {}).items():
            put_packed(self, _ROUTED, name, matrix, device)

    def _parameter(self, name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(shape, **options)))

    def reset_parameters(self) -> None:
        """Uniform matrices as nn.Linear has them, biases 0, scales 1."""
        select_bias = self._buffers.get("select_bias")
        if select_bias is not None:
            nn.init.zeros_(select_bias)
        in_out = {"down": self._spec.down_orientation}
        for name, parameter in self.named_parameters(recurse=False):
            coded = self._codes is not None and name in self._codes.names
            if coded or isinstance(parameter, PackedTensor):
                continue
            role = name.removeprefix("shared_expert_")
            if role in MATRICES:
                swapped = role == name and in_out.get(
                    role, self._spec.gate_up_orientation) == Orientation.IN_OUT
                bound = 1 / math.sqrt(parameter.shape[-2 if swapped else -1])
                nn.init.uniform_(parameter, -bound, bound)
            elif parameter.dim() > 1 and role in ("gate_weight", "shared_gate"):
                bound = 1 / math.sqrt(parameter.shape[-1])
                nn.init.uniform_(parameter, -bound, bound)
            else:
                nn.init.constant_(parameter, float("scale" in role))

    def _own(self) -> dict[str, Tensor | None]:
        """The parameters. Raises where one is computed from others: it would be left out."""
        if parametrize.is_parametrized(self):
            names = ", ".join(self.parametrizations)  # type: ignore[arg-type]
            raise TypeError(f"moec.torch: {names} is parametrized; moec reads parameters only")
        held = () if self._codes is None else self._codes.names
        return {name: one for name, one in self._parameters.items()
                if name not in held and not (self._is_packed and isinstance(one, PackedTensor))}

    def _routed(self) -> dict[str, Tensor]:
        own = self._own()
        found = {f: own.get(n) for f, n in _ROUTED.items()}
        return {field: parameter for field, parameter in found.items() if parameter is not None}

    def _matrices(self) -> dict[str, Tensor]:
        """The routed parameters by WeightSet's fields, packed ones among them."""
        return {field: tensor for field, name in _ROUTED.items()
                if (tensor := self._parameters.get(name)) is not None}

    def _dtype(self) -> torch.dtype:
        floats = (one.dtype for one in self._own().values() if one is not None)
        return next(floats, getattr(torch, numpy_dtype(self.desc.dtype).name))

    def freeze(self) -> Self:
        """Declare that the routed matrices do not change: a packed copy may serve them, until
        refresh() reads them again. load_state_dict() and what else changes them in place is seen by
        torch's version counters, and the next call reads them again. A write to `.data` is not
        seen, nor one to a tensor that was made in inference mode: call refresh() after it. A tensor
        at another address raises. Their gradients are skipped. Raises ValueError for parameters
        whose experts are neither contiguous nor transposed. Codes do not change anyway: a packed
        copy of them may serve."""
        self._pack = True
        if self._codes is not None:
            return self
        if self._is_packed:
            return self
        routed = self._routed()
        self._frozen = Frozen(self._spec, {n: p.detach() for n, p in routed.items()})
        for parameter in routed.values():
            parameter.requires_grad_(False)
        return self

    def refresh(self) -> None:
        """Read frozen matrices again after their values changed."""
        if self._codes is not None:
            return self._codes.bound.clear()
        if self._frozen is None:
            raise RuntimeError("moec.torch: refresh() of weights that are not frozen; freeze() is")
        self._frozen.refresh()

    def unfreeze(self) -> Self:
        """Trainable again: values are read by each call. Of codes: without a packed copy."""
        self._pack = False
        self._frozen = None
        for parameter in self._routed().values():
            parameter.requires_grad_(True)
        return self

    def use_main_grads(self, dtype: torch.dtype = torch.float32) -> Self:
        """Give each routed matrix and bias a `main_grad` of `dtype` that backward adds to, instead
        of a .grad: micro batches accumulate in fp32 without a second copy. Nothing is added for
        parameters that need no gradient. A copy of the module makes its own when it trains.
        Nobody else adds them up: DDP and FSDP do not know them, and under FSDP2 calls raise."""
        for parameter in self._routed().values():
            new_main_grad(parameter, dtype)
        self._main = dtype
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, by deepcopy or pickle, whose parameters have no attributes."""
        super().__setstate__(state)
        own = [self._parameters.get(name) for name in ROUTED_WEIGHTS]
        for parameter in own if self._main is not None else ():
            if parameter is not None and not hasattr(parameter, "main_grad"):
                parameter.main_grad = None  # type: ignore[attr-defined]

    def _main_grads(self) -> list[Tensor]:
        """The main gradients in order; one of size 0 where none is needed."""
        if self._main is None or self._frozen is not None or not torch.is_grad_enabled():
            return []
        complete_main_grads(traceable(self))
        return [getattr(p, "main_grad") if p.requires_grad else p.new_empty((0,))
                for p in self._routed().values()]

    def _settings(self) -> tuple[str, int]:
        """The spec's text, and the offset of the router's jitter."""
        return self._text, 0

    def _call(self, inputs: dict[str, Tensor | None]) -> tuple[Tensor, ...]:
        tensors = {**self._own(), **dict(self._buffers), **inputs}
        frozen = 0 if self._frozen is None else self._frozen.number
        if self._codes is not None:
            frozen = number(traceable(self), inputs["x"])
        elif self._is_packed:
            frozen = packed_number(traceable(self), inputs["x"])
        kind = _ops.EXPERTS if self._spec.router is None else _ops.LAYER
        text, rng_offset = self._settings()
        return _ops.call(kind, tensors, text, self.save, frozen=frozen, rng_offset=rng_offset,
                         main_grads=self._main_grads(), factors=self._factors(),
                         adapters=self._adapter_text)

    def extra_repr(self) -> str:
        desc = self.desc
        codes = "" if self._codes is None else f", codes={self._codes.kinds}"
        codes += ", packed" if self._is_packed else ""
        return (f"hidden={desc.hidden}, inter={desc.inter}, num_experts={desc.num_experts}, "
                f"top_k={desc.top_k}, activation={desc.activation.kind}{codes}")


class Experts(_Base):
    """The experts of a layer: y = sum_k w[t,k] expert(x[t]).

    desc         what they compute; its save is ignored
    gate_layout  which matrices there are: gate_up [E,2I,H], or gate and up, or up alone; [E,H,I]
                 down; last two dimensions swapped with Orientation.IN_OUT
    bias         every matrix has one [E,N]
    save         what training keeps for backward: INPUT is least memory, ALL least time
    codes        moec.read_experts() of a quantised checkpoint: frozen parameters in its types;
                 state_dict() has its names. dtype is not theirs: values are of the type of x
    packed       PackedTensors in the place of matrices, by their names; frozen
    ep           the experts lie on the ranks of this moec.torch.EP: the parameters are those of
                 this rank, and forward and backward are called on all ranks alike
    """

    def __init__(
        self,
        desc: ExpertsDesc,
        *,
        gate_layout: GateLayout = GateLayout.GATE_THEN_UP,
        gate_up_orientation: Orientation = Orientation.OUT_IN,
        down_orientation: Orientation = Orientation.OUT_IN,
        shared_gate_layout: GateLayout = GateLayout.SPLIT,
        bias: bool = False,
        output_bias: bool = False,
        save: Save = Save.PREACT,
        dtype: torch.dtype | None = None,
        device: Any = None,
        codes: Matrices | None = None,
        ep: EP | None = None,
        packed: Mapping[str, PackedTensor] | None = None,
    ) -> None:
        desc = _parallel.of_rank(desc, ep, codes, rest=output_bias or bool(
            desc.shared or desc.num_zero_experts))
        gate_layout = gate_layout if codes is None else codes.layout.gate_layout
        spec = Spec.of(desc, None, gate_layout, gate_up_orientation, down_orientation,
                       shared_gate_layout, plain=codes is None and not packed)
        super().__init__(spec, bias=bias, output_bias=output_bias, save=save, dtype=dtype,
                         device=device, codes=codes, ep=ep, packed=packed)
        self.reset_parameters()

    def forward(self, x: Tensor, expert_ids: Tensor, routing_weights: Tensor) -> Tensor:
        """y [...,H] of x [...,H]; expert_ids and routing_weights [T,K], ids outside [0,E+Z) mean no
        expert."""
        if self.ep is None:
            return self._experts(x, expert_ids, routing_weights)
        rows = x.reshape(-1, x.shape[-1])
        return _parallel.parted(self.ep, rows, expert_ids, routing_weights,
                                self._experts).view(x.shape)

    def _experts(self, x: Tensor, expert_ids: Tensor, routing_weights: Tensor) -> Tensor:
        return self._call(
            {"x": x, "expert_ids": expert_ids, "routing_weights": routing_weights}
        )[0]


class MoELayer(_Base):
    """Router and experts. The router's parameters are gate_weight [E+Z,H] and what its descriptor
    `router` asks for: gate_bias, input_scale, per_expert_scale; select_bias is a buffer in fp32,
    which update_bias() changes.

    Jitter is for training mode: each call takes its noise from torch's CPU generator, so that
    torch.manual_seed repeats it (a CUDA graph replays that of its capture); eval() is without.
    ep: as of Experts; gradients of the router and of the shared expert are of the rank's own
    tokens, as of any module that all ranks hold.
    """

    def __init__(
        self,
        router: RouterDesc,
        experts: ExpertsDesc,
        *,
        gate_layout: GateLayout = GateLayout.GATE_THEN_UP,
        gate_up_orientation: Orientation = Orientation.OUT_IN,
        down_orientation: Orientation = Orientation.OUT_IN,
        shared_gate_layout: GateLayout = GateLayout.SPLIT,
        bias: bool = False,
        output_bias: bool = False,
        save: Save = Save.PREACT,
        dtype: torch.dtype | None = None,
        device: Any = None,
        codes: Matrices | None = None,
        ep: EP | None = None,
        packed: Mapping[str, PackedTensor] | None = None,
    ) -> None:
        experts = _parallel.of_rank(experts, ep, codes)
        gate_layout = gate_layout if codes is None else codes.layout.gate_layout
        spec = Spec.of(experts, router, gate_layout, gate_up_orientation, down_orientation,
                       shared_gate_layout, plain=codes is None and not packed)
        if ep is not None:
            spec = replace(spec, ep=ep.number)
        super().__init__(spec, bias=bias, output_bias=output_bias, save=save, dtype=dtype,
                         device=device, codes=codes, ep=ep, packed=packed)
        self.router = router
        plain = replace(router, jitter=0.0, flags=router.flags & ~RouterFlags.JITTER_X)
        self._eval_text = replace(spec, router=plain).text() if router.jitter > 0 else self._text
        options = {"dtype": dtype or getattr(torch, numpy_dtype(experts.dtype).name),
                   "device": device}
        count = router.num_experts + router.num_zero_experts
        self._parameter("gate_weight", (count, experts.hidden), options)
        if router.flags & RouterFlags.LOGIT_BIAS:
            self._parameter("gate_bias", (count,), options)
        if router.input == RouterInput.RMS_SCALED:
            self._parameter("input_scale", (experts.hidden,), options)
        if router.flags & RouterFlags.PER_EXPERT_SCALE:
            self._parameter("per_expert_scale", (count,), options)
        if router.flags & RouterFlags.SELECT_BIAS:
            zeros = torch.zeros(count, dtype=torch.float32, device=device)
            self.register_buffer("select_bias", zeros)
        self.reset_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """select_bias moves to other devices, and stays in fp32."""
        held = self._buffers.get("select_bias")
        super()._apply(fn, recurse)
        made = self._buffers.get("select_bias")
        if held is not None and made is not None and made.dtype != torch.float32:
            self._buffers["select_bias"] = held.to(made.device, torch.float32)
        return self

    def _settings(self) -> tuple[str, int]:
        if not self.training:
            return self._eval_text, 0
        if self._eval_text == self._text:
            return self._text, 0
        return self._text, int(torch.randint(1 << 62, (), device="cpu").item())

    def forward(
        self,
        x: Tensor,
        *,
        router_x: Tensor | None = None,
        token_mask: Tensor | None = None,
        table: Tensor | None = None,
        token_ids: Tensor | None = None,
        given_ids: Tensor | None = None,
    ) -> Tensor:
        """y [...,H] of x [...,H]; the other inputs are Layer.forward's."""
        return self.route(x, router_x=router_x, token_mask=token_mask, table=table,
                          token_ids=token_ids, given_ids=given_ids)[0]

    def route(self, x: Tensor, **inputs: Tensor | None) -> tuple[Tensor, Routing]:
        """As forward, with the routing. Gradients start at y and at routing.logits."""
        y, logits, expert_ids, weights = self._call({"x": x, **inputs})
        return y, Routing(logits, expert_ids, weights)

    @torch.no_grad()
    def update_bias(self, counts: Tensor, *, rate: float) -> None:
        """select_bias[e] += rate * sign(mean(counts) - counts[e]): balance without a loss. counts
        [E+Z] i32 or i64 is the sum of routing.counts() over the micro batches and ranks of a step.
        Raises ValueError without RouterFlags.SELECT_BIAS."""
        bias = self._buffers.get("select_bias")
        if bias is None:
            raise ValueError(
                "moec.torch: the router has no select_bias; RouterFlags.SELECT_BIAS gives it one"
            )
        update_bias(self.router, counts, bias, rate)
