# SPDX-License-Identifier: Apache-2.0
"""The per-expert loop that users run today, in NumPy and its BLAS: `moec bench` measures it beside
moec, and the tests take it as a second opinion on the families table. Formulas: moec.h, 4 and 9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from ._descriptors import Activation, RouterDesc
from ._enums import (
    ActivationKind,
    GateLayout,
    GroupFill,
    Norm,
    Orientation,
    RouterInput,
    Score,
    Select,
    Shared,
    WeightPosition,
    WeightRule,
)
from .matrices import Matrices
from .model import LayerSpec

Floats: TypeAlias = Any
"""float32 array"""


def _sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


def _softmax(z: Floats) -> Floats:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


_SCORES: dict[Score, Callable[[Floats], Floats]] = {
    Score.SOFTMAX: _softmax,
    Score.SIGMOID: _sigmoid,
    Score.SQRT_SOFTPLUS: lambda z: np.sqrt(np.logaddexp(0, z)),
    Score.IDENTITY: lambda z: z,
}


def _gpt_oss(g: Floats, u: Floats, a: Activation) -> Floats:
    g, u = np.minimum(g, a.limit), np.clip(u, -a.limit, a.limit)
    return (u + 1) * g * _sigmoid(a.alpha * g)


def _silu(g: Floats) -> Floats:
    return g * _sigmoid(g)


_ACTIVATIONS: dict[ActivationKind, Callable[[Floats, Floats, Activation], Floats]] = {
    ActivationKind.SWIGLU: lambda g, u, a: _silu(g) * u,
    ActivationKind.GPTOSS: _gpt_oss,
    ActivationKind.CLAMP_SWIGLU: lambda g, u, a: (
        _silu(np.minimum(g, a.limit)) * np.clip(u, -a.limit, a.limit)
    ),
    ActivationKind.SWIGLU_CLAMP: lambda g, u, a: (
        np.minimum(_silu(g), a.limit) * np.clip(u, -a.limit, a.limit)
    ),
    ActivationKind.GEGLU_TANH: lambda g, u, a: (
        0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) * u
    ),
    ActivationKind.RELU2: lambda g, u, a: np.maximum(u, 0) ** 2,
    ActivationKind.SILU: lambda g, u, a: _silu(u),
}


def _group_limit(choice: Floats, desc: RouterDesc) -> Floats:
    groups = choice.reshape(len(choice), desc.num_groups, -1)
    best = np.sort(groups, -1)[..., -max(desc.group_top_m, 1) :].sum(-1)
    kept = np.argsort(-best, -1, kind="stable")[:, : desc.top_groups]
    allowed = np.zeros(best.shape, bool)
    np.put_along_axis(allowed, kept, True, -1)
    fill = 0.0 if desc.group_fill == GroupFill.ZERO else -np.inf
    return np.where(allowed[..., None], groups, fill).reshape(choice.shape)


def _sparse_mixer(z: Floats, desc: RouterDesc) -> tuple[Any, Floats]:
    ids, weights, left = [], [], z.copy()
    for _ in range(2):
        top = left.max(-1, keepdims=True)
        far = (top - z) / np.maximum(np.abs(z), top) > 2 * desc.mixer_eps
        ids.append(left.argmax(-1))
        weights.append(_softmax(np.where(far, -np.inf, left)).max(-1))
        np.put_along_axis(left, ids[-1][:, None], -np.inf, -1)
    return np.stack(ids, 1), np.stack(weights, 1)


def route(x: Floats, spec: LayerSpec) -> tuple[Any, Floats]:
    """Expert ids and weights [T,K] of x [T,H]."""
    desc, given = spec.router, {k: v.astype(np.float32) for k, v in spec.inputs.items()}
    if desc.input == RouterInput.RMS_SCALED:
        eps = desc.rms_eps or 1e-6
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * given["input_scale"]
        x = x / np.sqrt(x.shape[-1])
    z = x @ given["gate_weight"].T + given.get("gate_bias", np.float32(0))
    if desc.logit_softcap:
        z = desc.logit_softcap * np.tanh(z / desc.logit_softcap)
    if desc.selection == Select.SPARSE_MIXER:
        return _sparse_mixer(z, desc)
    score = _SCORES[desc.score](z)
    choice = score + given.get("select_bias", np.float32(0))
    if desc.selection == Select.GROUP_TOPK:
        choice = _group_limit(choice, desc)
    ids = np.argsort(-choice, -1, kind="stable")[:, : desc.top_k]
    w = np.take_along_axis(score, ids, -1)
    if desc.weight_rule == WeightRule.SOFTMAX_SELECTED:
        w = _softmax(np.take_along_axis(z, ids, -1))
    elif desc.weight_rule == WeightRule.SIGMOID_SELECTED:
        w = _sigmoid(np.take_along_axis(z, ids, -1))
    total = w.sum(-1, keepdims=True)
    if desc.norm == Norm.SUM:
        w = w / (total + desc.norm_eps)
    elif desc.norm == Norm.CLAMP_SUM:
        w = w / np.maximum(total, desc.norm_eps)
    elif desc.norm == Norm.P:
        p = desc.norm_p or 1.0
        w = w / (np.abs(w) ** p).sum(-1, keepdims=True) ** (1 / p)
    w = w * (desc.scale or 1.0)
    return ids, w * given["per_expert_scale"][ids] if "per_expert_scale" in given else w


def mlp(x: Floats, matrices: Matrices, expert: int, activation: Activation) -> Floats:
    """One expert: down(act(gate x, up x)), with biases where there are any."""
    arrays, layout = matrices.arrays, matrices.layout

    def linear(name: str, x: Floats, orientation: Orientation) -> Floats:
        w = np.asarray(getattr(arrays, name)[expert], np.float32)  # no copy when it is
        y = x @ (w.T if orientation == Orientation.OUT_IN else w)
        bias = getattr(arrays, f"{name}_bias")
        return y if bias is None else y + bias[expert].astype(np.float32)

    first = layout.gate_up_orientation
    if layout.gate_layout == GateLayout.NONE:
        gate = up = linear("up", x, first)
    elif layout.gate_layout == GateLayout.SPLIT:
        gate, up = linear("gate", x, first), linear("up", x, first)
    else:
        both = linear("gate_up", x, first)
        half = both.shape[-1] // 2
        gate, up = both[:, :half], both[:, half:]
        if layout.gate_layout == GateLayout.INTERLEAVED:
            gate, up = both[:, 0::2], both[:, 1::2]
        elif layout.gate_layout == GateLayout.UP_THEN_GATE:
            gate, up = up, gate
    hidden = _ACTIVATIONS[activation.kind](gate, up, activation)
    return linear("down", hidden, layout.down_orientation)


def forward(x: Floats, spec: LayerSpec) -> Floats:
    """y [T,H] of x [T,H], everything in fp32, one expert after the other."""
    ids, weights = route(x, spec)
    desc = spec.experts
    y = np.zeros_like(x)
    for expert in range(desc.num_experts):
        token, slot = np.nonzero(ids == expert)
        if len(token):
            w = weights[token, slot, None]
            if desc.weight_position == WeightPosition.ON_INPUT:
                y[token] += mlp(x[token] * w, spec.matrices, expert, desc.activation)
            else:
                y[token] += mlp(x[token], spec.matrices, expert, desc.activation) * w
    identity = np.where(ids >= desc.num_experts, weights, 0).sum(-1, keepdims=True)
    y = (y + identity * x) * (desc.output_scale or 1.0)
    if "output_bias" in spec.inputs:
        y = y + spec.inputs["output_bias"].astype(np.float32)
    if spec.shared is None:
        return y
    shared = mlp(x, spec.shared, 0, desc.shared_activation)
    if desc.shared == Shared.ADD:
        return y + shared
    gate = x @ spec.inputs["shared_gate"].astype(np.float32).T
    if desc.shared == Shared.SIGMOID_GATE:
        return y + _sigmoid(gate) * shared
    mix = _softmax(gate + spec.inputs["shared_gate_bias"].astype(np.float32))
    return y * mix[:, :1] + shared * mix[:, 1:]
