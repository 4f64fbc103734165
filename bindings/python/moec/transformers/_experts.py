# SPDX-License-Identifier: Apache-2.0
"""The experts of one module: what its class and parameters say, and the call."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .._descriptors import ExpertsDesc
from .._enums import ExpertsDescFlags, GateLayout, Orientation, Save, WeightPosition
from .._spec import Spec
from ..torch import _adapted, _ops
from ..torch._constants import constant, module_of, traceable
from ..torch._frozen import Frozen
from ..torch._structs import has_autocast
from ..torch._packed import PackedTensor
from ..torch._packed_weights import PackedWeights, packed_weights
from ._gates import activation_of
from ._packed import BIASES, STACKS, has_packed, has_parameters_alone, is_in_out, stored

_NAMES = {name.replace("_proj", ""): name for name in (*STACKS, *BIASES)}
FIELDS = {parameter: field for field, parameter in _NAMES.items()}
MATRICES = frozenset(n for n in _NAMES.values() if not n.endswith("_bias"))
NAME = "moec"

Adapters: TypeAlias = "tuple[Sequence[_adapted.Term], Sequence[Tensor]]"
"""of a call: terms, and the factors of each in turn"""


class _Given(threading.local):
    """The adapters that wait for the call of their module, on this thread."""

    def __init__(self) -> None:
        self.adapters: dict[nn.Module, Adapters] = {}


_given = _Given()
_texts: weakref.WeakKeyDictionary[nn.Module, dict[Any, str]] = weakref.WeakKeyDictionary()
_frozen: weakref.WeakKeyDictionary[nn.Module, Frozen] = weakref.WeakKeyDictionary()


def spec_of(module: nn.Module, top_k: int) -> Spec:
    """What an experts module computes. Raises NotImplementedError naming its class."""
    name = type(module).__name__
    if getattr(module, "has_post_expert_norm", False):
        raise NotImplementedError(
            f"moec.transformers: {name} normalises each expert's output, which moec does not"
        )
    tensors = tensors_of(module)
    if "down" not in tensors or not {"gate_up", "up"} & tensors.keys():
        raise NotImplementedError(
            f"moec.transformers: {name} has the parameters "
            f"{', '.join(n for n, _ in module.named_parameters())}; "
            "gate_up_proj or up_proj, and down_proj are needed"
        )
    for tensor in tensors.values():
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise NotImplementedError(
                f"moec.transformers: {name} has weights in {tensor.dtype}; "
                "float32, float16 and bfloat16 are implemented"
            )
    gated = "gate_up" in tensors
    packed = any(isinstance(tensor, PackedTensor) for tensor in tensors.values())
    concatenated = getattr(module, "is_concatenated", True)
    layout = GateLayout.GATE_THEN_UP if concatenated else GateLayout.INTERLEAVED
    if not gated:
        layout = GateLayout.NONE
    is_llama4, in_out = not hasattr(module, "is_transposed"), is_in_out(module)
    down = tensors["down"]
    hidden, inter = down.shape[:0:-1] if in_out else down.shape[1:]
    orientation = Orientation.IN_OUT if in_out else Orientation.OUT_IN
    return Spec(
        experts=ExpertsDesc(
            hidden=hidden, inter=inter, num_experts=down.shape[0], top_k=top_k,
            activation=activation_of(module),
            gate_layout=GateLayout.SPLIT if gated else GateLayout.NONE,
            weight_position=WeightPosition.ON_INPUT if is_llama4 else WeightPosition.ON_OUTPUT,
            flags=ExpertsDescFlags.NONE if packed else ExpertsDescFlags.PLAIN_WEIGHTS,
        ),
        gate_layout=layout, gate_up_orientation=orientation, down_orientation=orientation,
    )


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's matrices and biases by WeightSet's names."""
    return {field: tensor for field, name in _NAMES.items()
            if (tensor := stored(module, name)) is not None}


@constant
def _plain_names(of: nn.Module | int) -> tuple[str, ...]:
    return tuple(name for name, tensor in tensors_of(module_of(of)).items()
                 if not isinstance(tensor, PackedTensor))


@constant
def packed_dtype(of: nn.Module | int) -> torch.dtype:
    """The type of the values of a module's packed matrices."""
    return tensors_of(module_of(of))["down"].dtype


@constant
def packed_number(of: nn.Module | int, dtype: torch.dtype) -> int:
    """The number of the weights of a module with packed matrices in a graph."""
    module = module_of(of)
    found = _packed(module, tensors_of(module), dtype)
    found.watch(module, tensors_of)
    return found.number


def _packed(module: nn.Module, tensors: dict[str, Tensor], dtype: torch.dtype) -> PackedWeights:
    """The library's weights of a module with packed matrices, for values of a type; `number` names
    them in a call. Where all are plain a call reads them from tensors_of()."""
    is_differentiated = torch.is_grad_enabled()
    for name, tensor in tensors.items():
        if is_differentiated and tensor.requires_grad and isinstance(tensor, PackedTensor):
            raise RuntimeError(
                f"moec.transformers: {_NAMES[name]} of {type(module).__name__} is packed and "
                "requires a gradient, which codes do not have; adapters can be trained"
            )
    return packed_weights(module, tensors, dtype, lambda: spec_of(module, 1))


@constant
def text_of(of: nn.Module | int, top_k: int) -> str:
    """The spec's text, made once for a module and the shapes of its weights, until forget()."""
    module = module_of(of)
    return _text(module, tensors_of(module), top_k)


def _text(module: nn.Module, tensors: dict[str, Tensor], top_k: int) -> str:
    texts = _texts.setdefault(module, {})
    key = (top_k, *[t.shape for t in tensors.values()])
    if key not in texts:
        texts[key] = spec_of(module, top_k).text()
    return texts[key]


def forget(module: nn.Module) -> None:
    """Let the next call describe the module anew."""
    _texts.pop(module, None)


@constant
def frozen_number(of: nn.Module | int) -> int:
    """Number of the module's frozen weights, 0 when they are read by each call."""
    frozen = _frozen.get(module_of(of))
    return 0 if frozen is None else frozen.number


def freeze(module: nn.Module, top_k: int) -> None:
    """Pack the module's weights; refresh() reads them again."""
    tensors = {n: t.detach() for n, t in tensors_of(module).items()}
    _frozen[module] = Frozen(spec_of(module, top_k), tensors)


def unfreeze(module: nn.Module) -> None:
    """Let each call read the module's weights again."""
    _frozen.pop(module, None)


def refresh_module(module: nn.Module) -> None:
    if module in _frozen:
        _frozen[module].refresh()


def is_served(module: nn.Module) -> bool:
    """Whether a call of this experts module comes to experts_forward()."""
    if hasattr(module, "_apply_gate"):
        config: Any = getattr(module, "config", None)
        own, field = getattr(config, "__dict__", {}), "_experts_implementation_internal"
        # The field of the property, which asks about every name of the config.
        said = own[field] if field in own else getattr(config, "_experts_implementation", None)
        return bool(said == NAME)
    own = (vars(module).get(name) for name in ("forward", "_old_forward"))
    return any(isinstance(f, partial) and f.func is experts_forward for f in own)


def call_with_adapters(
    module: nn.Module, terms: Sequence[_adapted.Term], factors: Sequence[Tensor], *args: Any,
    **kwargs: Any,
) -> Any:
    """A call of a module that has adapters. Raises RuntimeError when it did not come to moec: the
    adapters would have been left out."""
    if not terms:
        return module(*args, **kwargs)
    waiting = _given.adapters
    waiting[module] = terms, factors
    try:
        found = module(*args, **kwargs)
        if module in waiting:
            names = dict.fromkeys(_NAMES[term.place] for term in terms)
            raise RuntimeError(
                f"moec.transformers: {type(module).__name__} did not use the adapters of "
                f"{', '.join(names)} in its forward; enable(model) after changing its forward"
            )
        return found
    finally:
        waiting.pop(module, None)


def _adapters_of(module: nn.Module, spec: str) -> tuple[Sequence[Tensor], str]:
    """The adapters of this call, which counts as their use: factors and text for _ops.call()."""
    found = _given.adapters.pop(module, None)
    if found is None:
        return (), ""
    terms, factors = found
    return factors, _adapted.text_of(Spec.parse(spec).gate_layout, terms)


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' experts interface: hidden_states [T,H], top_k_index and top_k_weights [T,K] ->
    [T,H]. Indices of num_experts and above mean no expert."""
    device, x, top_k = hidden_states.device.type, hidden_states, top_k_index.shape[-1]
    autocast = torch.get_autocast_dtype(device) if has_autocast(device) else None
    look = _traced if torch.compiler.is_compiling() else _seen
    tensors, dtype, number, text = look(self, top_k, autocast)
    if dtype is not None and dtype != x.dtype:
        x = x.to(dtype)
    tensors |= {"x": x, "expert_ids": top_k_index, "routing_weights": top_k_weights}
    # _peft leaves a graph for a call with adapters.
    has_none = torch.compiler.is_dynamo_compiling()
    factors, adapters = ((), "") if has_none else _adapters_of(self, text)
    y = _ops.call(_ops.EXPERTS, tensors, text, Save.PREACT, frozen=number, factors=factors,
                  adapters=adapters)[0]
    return y if y.dtype == hidden_states.dtype else y.to(hidden_states.dtype)


Look: TypeAlias = "tuple[dict[str, Any], torch.dtype | None, int, str]"
"""what a call reads itself, the type of x, the number of weights that are bound, the spec's text"""


def _seen(module: nn.Module, top_k: int, autocast: torch.dtype | None) -> Look:
    """A module as it is now."""
    if has_parameters_alone(module):
        held = module._parameters
        tensors = {field: tensor for field, name in _NAMES.items()
                   if (tensor := held.get(name)) is not None}
    else:
        tensors = tensors_of(module)
    text = _text(module, tensors, top_k)
    plain = {name: t for name, t in tensors.items() if not isinstance(t, PackedTensor)}
    dtype = autocast or tensors["down"].dtype
    if len(plain) < len(tensors):
        return plain, dtype, _packed(module, tensors, dtype).number, text
    return plain, None if autocast else dtype, frozen_number(module), text


def _traced(module: nn.Module, top_k: int, autocast: torch.dtype | None) -> Look:
    """The same for a graph, which keeps what functions say of a module."""
    of = traceable(module)
    text = text_of(of, top_k)
    if has_packed(of):
        plain = {name: getattr(module, _NAMES[name]) for name in _plain_names(of)}
        dtype = autocast or packed_dtype(of)
        return plain, dtype, packed_number(of, dtype), text
    tensors = tensors_of(module)
    return tensors, None if autocast else tensors["down"].dtype, frozen_number(of), text
