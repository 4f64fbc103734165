# SPDX-License-Identifier: Apache-2.0
"""Which activation a module's experts have: a table of classes, and a check that the table is
right: the module's own gate and the table's formula, evaluated on the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._descriptors import Activation
from .._enums import ActivationKind as Kind

_LIMIT = "swiglu_limit"

# Class of act_fn -> kind, for experts with transformers' default gate: act_fn(gate) * up.
_GATED: dict[str, Kind] = {
    "SiLUActivation": Kind.SWIGLU, "SiLU": Kind.SWIGLU,
    "GELUActivation": Kind.GEGLU_ERF, "GELUTanh": Kind.GEGLU_TANH, "GELU": Kind.GEGLU_ERF,
    "PytorchGELUTanh": Kind.GEGLU_TANH, "NewGELUActivation": Kind.GEGLU_TANH,
    "QuickGELUActivation": Kind.QUICK_GEGLU,
}
# Likewise for experts without a gate: act_fn(up).
_PLAIN: dict[str, Kind] = {
    "ReLUSquaredActivation": Kind.RELU2, "SiLUActivation": Kind.SILU, "SiLU": Kind.SILU,
    "LinearActivation": Kind.IDENTITY, "Identity": Kind.IDENTITY,
}
# Class of experts with a gate of its own -> kind, and where its parameters are.
_OWN: dict[str, tuple[Kind, dict[str, str]]] = {
    "GptOssExperts": (Kind.GPTOSS, {"alpha": "alpha", "limit": "limit"}),
    "OpenAIPrivacyFilterExperts": (Kind.GPTOSS, {"alpha": "alpha", "limit": "limit"}),
    "MiniMaxM3VLExperts": (Kind.GPTOSS, {"alpha": "swiglu_alpha", "limit": _LIMIT}),
    "DeepseekV4Experts": (Kind.CLAMP_SWIGLU, {"limit": "limit"}),
    "HYV4Experts": (Kind.CLAMP_SWIGLU, {"limit": _LIMIT}),
    "Glm5NextTextExperts": (Kind.CLAMP_SWIGLU, {"limit": _LIMIT}),
    "Step3p7Experts": (Kind.SWIGLU_CLAMP, {"limit": "limit"}),
    "BeamExperts": (Kind.SWIGLU, {}),
}

Formula = Callable[[Tensor, Tensor, Activation], Tensor]
_FORMULAS: dict[Kind, Formula] = {
    Kind.SWIGLU: lambda g, u, a: functional.silu(g) * u,
    Kind.GEGLU_ERF: lambda g, u, a: functional.gelu(g) * u,
    Kind.GEGLU_TANH: lambda g, u, a: functional.gelu(g, approximate="tanh") * u,
    Kind.QUICK_GEGLU: lambda g, u, a: g * torch.sigmoid(1.702 * g) * u,
    Kind.GPTOSS: lambda g, u, a: (
        (u.clamp(-a.limit, a.limit) + 1)
        * g.clamp(max=a.limit) * torch.sigmoid(a.alpha * g.clamp(max=a.limit))
    ),
    Kind.CLAMP_SWIGLU: lambda g, u, a: (
        functional.silu(g.clamp(max=a.limit)) * u.clamp(-a.limit, a.limit)
    ),
    Kind.SWIGLU_CLAMP: lambda g, u, a: (
        functional.silu(g).clamp(max=a.limit) * u.clamp(-a.limit, a.limit)
    ),
    Kind.RELU2: lambda g, u, a: functional.relu(u).square(),
    Kind.SILU: lambda g, u, a: functional.silu(u),
    Kind.IDENTITY: lambda g, u, a: u,
}


def activation_of(module: nn.Module) -> Activation:
    """The activation of an experts module. Raises NotImplementedError naming its class."""
    name = class_in(_OWN, module) or type(module).__name__
    plain = not getattr(module, "has_gate", True)
    act = type(getattr(module, "act_fn", None)).__name__
    fields: dict[str, Any] = {}
    if name in _OWN:
        kind, places = _OWN[name]
        fields = {field: float(getattr(module, place)) for field, place in places.items()}
    elif plain or has_default_gate(module):
        known = _PLAIN if plain else _GATED
        if act not in known:
            raise NotImplementedError(
                f"moec.transformers: {name} has the activation {act}; {', '.join(known)} are known"
            )
        kind = known[act]
    else:
        raise NotImplementedError(
            f"moec.transformers: {name} has a gate of its own that is not in the table; "
            f"{', '.join(_OWN)} are"
        )
    found = Activation(kind=kind, **fields)
    _probe(module, found, plain)
    return found


def class_in(table: Collection[str], module: nn.Module) -> str | None:
    """The name under which a module's class is in a table; FSDP and parametrizations subclass it
    under names of their own."""
    return next((c.__name__ for c in type(module).__mro__ if c.__name__ in table), None)


def has_default_gate(module: nn.Module) -> bool:
    """Whether the gate is act_fn(gate) * up: transformers' default, or Llama-4's inline one."""
    gate = getattr(type(module), "_apply_gate", None)
    return gate is None or gate.__name__ == "_default_apply_gate"


def _probe(module: nn.Module, found: Activation, plain: bool) -> None:
    """Raise unless the module's own gate agrees with the table's formula, also beyond clamps."""
    width = 64
    generator = torch.Generator().manual_seed(1)
    both = 9 * torch.randn(
        32, 2 * width, generator=generator, device="cpu", dtype=torch.float32
    )
    gate, up = both.chunk(2, -1)
    if not getattr(module, "is_concatenated", True):
        both = torch.stack((gate, up), -1).flatten(-2)
    act_fn: Any = getattr(module, "act_fn", None)
    own: Any = getattr(module, "_apply_gate", None)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        if plain:
            value = act_fn(up)
        elif own is None:
            value = act_fn(gate) * up
        else:
            value = own(both)
        ref = _FORMULAS[Kind(found.kind)](gate, up, found)
    if value.shape != ref.shape or not torch.allclose(value, ref, rtol=1e-4, atol=1e-4):
        raise NotImplementedError(
            f"moec.transformers: the gate of {type(module).__name__} does not compute "
            f"{Kind(found.kind).name}, which the table says"
        )
