# SPDX-License-Identifier: Apache-2.0
"""Activations are found by what they compute: classes, plain functions, gates of a class's own."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from models import build, switch, tokens
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

import moec.transformers
from moec import ActivationKind as Kind
from moec.transformers._experts import spec_of

Act = Callable[[Tensor], Tensor]
GATED: dict[str, tuple[Act, Kind]] = {
    "function": (functional.silu, Kind.SWIGLU),
    "lambda": (lambda x: x * x.sigmoid(), Kind.SWIGLU),
    "gelu": (functional.gelu, Kind.GEGLU_ERF),
    "partial": (functools.partial(functional.gelu, approximate="tanh"), Kind.GEGLU_TANH),
    "quick": (lambda x: x * (1.702 * x).sigmoid(), Kind.QUICK_GEGLU),
    **{name: (ACT2FN[name], kind) for name, kind in (
        ("silu", Kind.SWIGLU), ("swish", Kind.SWIGLU), ("gelu_python", Kind.GEGLU_ERF),
        ("gelu_new", Kind.GEGLU_TANH), ("gelu_fast", Kind.GEGLU_TANH),
        ("gelu_accurate", Kind.GEGLU_TANH), ("quick_gelu", Kind.QUICK_GEGLU))},
}
PLAIN: dict[str, tuple[Act, Kind]] = {
    "silu": (functional.silu, Kind.SILU), "identity": (lambda x: x, Kind.IDENTITY),
    "relu2": (lambda x: functional.relu(x) ** 2, Kind.RELU2),
}
OTHERS: dict[str, tuple[Act, str]] = {
    "clipped": (ACT2FN["gelu_10"], "ClippedGELUActivation computes none of SWIGLU, GEGLU_ERF"),
    "clipped far": (lambda x: functional.silu(x).clamp(max=3000.0), "computes none of"),
    "almost": (lambda x: 1.001 * functional.silu(x), "<lambda> computes none of"),
    "relu": (functional.relu, "Qwen3MoeExperts with the activation relu computes none of"),
    "trained": (nn.PReLU(), "PReLU has parameters to train"),
    "of two": (lambda x, y: x * y, "fails on fp32 numbers on the CPU"),
}


def set_act(module: nn.Module, act: Act) -> None:
    del module.act_fn  # a module cannot be replaced by a function
    module.act_fn = act


@pytest.mark.parametrize("name", GATED)
def test_gated(name: str) -> None:
    model = build("qwen3_moe")
    act, kind = GATED[name]
    for module in moec.transformers.enable(model):
        module.gate_up_proj.data.mul_(4)
        set_act(module, act)
    for module in moec.transformers.enable(model):
        assert spec_of(module, 3).experts.activation.kind == kind
    got = model(tokens()).logits
    switch(model, [], "eager")
    torch.testing.assert_close(got, model(tokens()).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", PLAIN)
def test_plain(name: str) -> None:
    module = moec.transformers.enable(build("qwen3_moe"))[0]
    module.up_proj, module.has_gate = nn.Parameter(module.gate_up_proj.data), False
    del module.gate_up_proj
    act, kind = PLAIN[name]
    set_act(module, act)
    assert spec_of(module, 3).experts.activation.kind == kind


def test_a_gate_of_a_class_unknown() -> None:
    """Of a class that no table has, in a type of its own."""
    module = moec.transformers.enable(build("qwen3_moe"))[0]
    own = {"_apply_gate": lambda self, both: functional.silu(both.chunk(2, -1)[0].float())
                                             * both.chunk(2, -1)[1].float()}
    module.__class__ = type("NewExperts", (type(module),), own)
    assert spec_of(module, 3).experts.activation.kind == Kind.SWIGLU


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_refused(name: str) -> None:
    model = build("qwen3_moe")
    act, text = OTHERS[name]
    set_act(moec.transformers.enable(model)[0], act)
    with pytest.raises(NotImplementedError, match=text):
        moec.transformers.enable(model)
