# SPDX-License-Identifier: Apache-2.0
"""Which activation a module's experts have: that whose formula gives what the module's own gate
gives on the same numbers. Names say nothing about it: a function can have any."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .._descriptors import Activation
from .._enums import ActivationKind as Kind

_LIMIT = "swiglu_limit"

# What is tried for experts with a gate, and for those without.
_GATED = (Kind.SWIGLU, Kind.GEGLU_ERF, Kind.GEGLU_TANH, Kind.QUICK_GEGLU)
_PLAIN = (Kind.RELU2, Kind.SILU, Kind.IDENTITY)
# Class of experts whose gate has parameters -> kind, and where they are.
_OWN: dict[str, tuple[Kind, dict[str, str]]] = {
    "GptOssExperts": (Kind.GPTOSS, {"alpha": "alpha", "limit": "limit"}),
    "OpenAIPrivacyFilterExperts": (Kind.GPTOSS, {"alpha": "alpha", "limit": "limit"}),
    "MiniMaxM3VLExperts": (Kind.GPTOSS, {"alpha": "swiglu_alpha", "limit": _LIMIT}),
    "DeepseekV4Experts": (Kind.CLAMP_SWIGLU, {"limit": "limit"}),
    "HYV4Experts": (Kind.CLAMP_SWIGLU, {"limit": _LIMIT}),
    "Glm5NextTextExperts": (Kind.CLAMP_SWIGLU, {"limit": _LIMIT}),
    "Step3p7Experts": (Kind.SWIGLU_CLAMP, {"limit": "limit"}),
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
    plain = not getattr(module, "has_gate", True)
    name = class_in(_OWN, module)
    if name is None:
        known = [Activation(kind=kind) for kind in (_PLAIN if plain else _GATED)]
    else:
        kind, places = _OWN[name]
        fields: Any = {field: float(getattr(module, place)) for field, place in places.items()}
        known = [Activation(kind=kind, **fields)]
    gate, up = _numbers()
    value = _value(module, gate, up, plain)
    errors = [_error(value, _FORMULAS[Kind(a.kind)](gate, up, a), gate, up) for a in known]
    if min(errors) > 1:
        raise _not_known(module, f"computes none of {', '.join(Kind(a.kind).name for a in known)}")
    return known[errors.index(min(errors))]


def class_in(table: Collection[str], module: nn.Module) -> str | None:
    """The name under which a module's class is in a table; FSDP and parametrizations subclass it
    under names of their own."""
    return next((c.__name__ for c in type(module).__mro__ if c.__name__ in table), None)


def _not_known(module: nn.Module, why: str) -> NotImplementedError:
    act = getattr(module, "act_fn", None)
    label = getattr(act, "__name__", type(act).__name__)
    return NotImplementedError(
        f"moec.transformers: {type(module).__name__} with the activation {label} {why}"
    )


def _numbers() -> tuple[Tensor, Tensor]:
    """Gates and ups of every size from 1 to 2e4, where a limit shows."""
    generator = torch.Generator().manual_seed(1)
    options: Any = {"device": "cpu", "dtype": torch.float32}
    both = torch.randn(64, 128, generator=generator, **options)
    both *= (torch.arange(len(both), **options)[:, None] / 5).exp2()
    gate, up = both.chunk(2, -1)
    return gate, up


def _value(module: nn.Module, gate: Tensor, up: Tensor, plain: bool) -> Any:
    """What the module itself makes of them."""
    act_fn: Any = getattr(module, "act_fn", None)
    own: Any = getattr(module, "_apply_gate", None)
    if isinstance(act_fn, nn.Module) and any(True for _ in act_fn.parameters()):
        raise _not_known(module, "has parameters to train, which moec's activations do not have")
    if getattr(module, "is_concatenated", True):
        both = torch.cat((gate, up), -1)
    else:
        both = torch.stack((gate, up), -1).flatten(-2)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            if plain:
                return act_fn(up)
            return act_fn(gate) * up if own is None else own(both)
        except Exception as error:
            raise _not_known(module, f"fails on fp32 numbers on the CPU: {error}") from error


def _error(value: Any, ref: Tensor, gate: Tensor, up: Tensor) -> float:
    """The largest error, in units of what is allowed: fp32's rounding, where terms cancel too."""
    if not isinstance(value, Tensor) or value.shape != ref.shape:
        return math.inf
    allowed = 1e-4 * ref.abs() + 1e-6 * (1 + gate.abs()) * (1 + up.abs())
    worst = float(((value - ref).abs() / allowed).max())
    return math.inf if math.isnan(worst) else worst
