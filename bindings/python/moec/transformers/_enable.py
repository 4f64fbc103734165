# SPDX-License-Identifier: Apache-2.0
"""Registration with transformers, and enable() for a model that is built."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from ..torch._engine import refuse_strides
from ._experts import (
    experts_forward,
    forget,
    freeze,
    refresh_module,
    tensors_of,
    text_of,
    unfreeze,
)
from ._gates import class_in

NAME = "moec"
ExpertsInterface.register(NAME, experts_forward)

_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts", "moe_topk")
_BLOCK = re.compile(r"(Experts|MoE|Moe|MoEBlock|MoeBlock)$")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _llama4_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Llama-4's block: the sigmoid of the selected logits scales the experts' input."""
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    logits = self.router(hidden_states)[1]
    top, index = torch.topk(logits, self.top_k, dim=1)
    scores = torch.sigmoid(top.float()).to(logits.dtype)
    out = self.shared_expert(hidden_states)
    return out + experts_forward(self.experts, hidden_states, index, scores), logits


# Blocks that transformers does not dispatch: class -> forward of the block.
_BLOCKS: dict[str, Callable[..., Any]] = {"Llama4TextMoe": _llama4_forward}


def enable(model: nn.Module, *, frozen: bool = False) -> list[nn.Module]:
    """Run the experts of a built model on moec. Returns the experts modules, in the model's order.

    frozen  their values do not change until refresh(model): a packed copy may serve them, which
            takes memory and saves time in inference; no gradients of these weights are computed.
            False: each call reads them, also where they were frozen; requires_grad stays as it is

    Raises NotImplementedError, naming the class, for a MoE block that moec does not know, and
    ValueError when there is none, or when parameters to be frozen are not contiguous. On an error
    nothing has been changed.
    """
    modules = list(model.named_modules())
    forwards = {m: _BLOCKS[name] for _, m in modules if (name := class_in(_BLOCKS, m))}
    blocks = list(forwards)
    within = {m.experts for m in blocks}
    dispatched = [m for _, m in modules if hasattr(m, "_apply_gate") and m not in within]
    chosen = [m for _, m in modules if m in within or m in dispatched]
    _refuse_left_out(modules, blocks, chosen)
    if not chosen:
        raise ValueError(f"moec.transformers: {type(model).__name__} has no MoE block")
    for module in chosen:
        top_k = _top_k(module, blocks)
        forget(module)
        text_of(module, top_k)
        if frozen:
            refuse_strides(tensors_of(module))
    for block, forward in forwards.items():
        # Not a bound method: pickle looks for those in the class.
        block.forward = partial(forward, block)
    for module in dispatched:
        config: Any = module.config
        config._experts_implementation_internal = NAME
    for module in chosen:
        if not frozen:
            unfreeze(module)
            continue
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        freeze(module, _top_k(module, blocks))
    return chosen


def refresh(model: nn.Module) -> None:
    """Read frozen experts again after their values changed."""
    for module in model.modules():
        refresh_module(module)


def _top_k(module: nn.Module, blocks: list[nn.Module]) -> int:
    for block in blocks:
        if block.experts is module:
            return int(block.top_k)  # type: ignore[arg-type]
    config: Any = module.config
    found = [getattr(config, name, None) for name in _TOP_K]
    return next((int(value) for value in found if value), 1)


def _refuse_left_out(
    modules: list[tuple[str, nn.Module]], blocks: list[nn.Module], chosen: list[nn.Module]
) -> None:
    """Raise if something that looks like a MoE block would go on without moec."""
    covered = set(chosen)
    for block in (*blocks, *chosen):
        covered |= set(block.modules())
    for path, module in modules:
        if module in covered or not _looks_like_experts(path, module):
            continue
        if not covered & set(module.modules()):
            raise NotImplementedError(
                f"moec.transformers: {path} is a {type(module).__name__}, which moec does not "
                f"know; {', '.join(_BLOCKS)} and what transformers dispatches are"
            )


def _looks_like_experts(path: str, module: nn.Module) -> bool:
    if _BLOCK.search(type(module).__name__) or path.rpartition(".")[2] == "experts":
        return True
    stacked = any(p.dim() == 3 for p in module.parameters(recurse=False))
    return stacked and not isinstance(module, _CONVOLUTIONS)
