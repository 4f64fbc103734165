# SPDX-License-Identifier: Apache-2.0
"""Registration with transformers, and enable() for a model that is built."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
from transformers.integrations.moe import ExpertsInterface

from ..torch._layouts import turned_sets
from ._experts import (
    NAME,
    experts_forward,
    forget,
    freeze,
    refresh_module,
    tensors_of,
    text_of,
    unfreeze,
)
from ._gates import class_in
from ._peft import install_if_there

ExpertsInterface.register(NAME, experts_forward)
FP8ExpertsInterface.register(NAME, experts_forward)
install_if_there()

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
    # As a module: what hangs on it, or is put around it, has its part.
    return out + self.experts(hidden_states, index, scores), logits


# Blocks that transformers does not dispatch: class -> forward of the block, class of its experts.
_BLOCKS: dict[str, tuple[Callable[..., Any], str]] = {
    "Llama4TextMoe": (_llama4_forward, "Llama4TextExperts"),
}


def enable(model: nn.Module, *, frozen: bool = False) -> list[nn.Module]:
    """Run the experts of a built model on moec. Returns the experts modules, in the model's order.

    frozen  their values do not change until refresh(model): a packed copy may serve them, which
            takes memory and saves time in inference; no gradients of these weights are computed.
            The next call reads them again after load_state_dict() and changes in place; writes to
            `.data` and to tensors made in inference mode are not seen
            False: each call reads them, also where they were frozen; requires_grad stays as it is

    Raises NotImplementedError, naming the class, for a MoE block that moec does not know, and
    ValueError when there is none, or when experts to be frozen are neither contiguous nor
    transposed. On an error nothing has been changed. Hooks on the modules stay, accelerate's
    included.
    """
    modules = list(model.named_modules())
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    block_of: dict[nn.Module, nn.Module] = {}
    for _, block in modules:
        if name := class_in(_BLOCKS, block):
            forwards[block], experts = _BLOCKS[name]
            block_of |= {m: block for m in block.modules() if class_in((experts,), m)}
    forwards |= dict.fromkeys(block_of, experts_forward)
    dispatched = [m for _, m in modules if hasattr(m, "_apply_gate") and m not in block_of]
    chosen = [m for _, m in modules if m in block_of or m in dispatched]
    _refuse_left_out(modules, set(block_of.values()), chosen)
    _refuse_replaced(modules, forwards)
    if not chosen:
        raise ValueError(f"moec.transformers: {type(model).__name__} has no MoE block")
    for module in chosen:
        forget(module)
        text_of(module, _top_k(module, block_of))
        if frozen:
            turned_sets(tensors_of(module))  # raises for what cannot be frozen
    for module, forward in forwards.items():
        # Not a bound method: pickle looks for those in the class.
        setattr(module, _place_of_forward(module), partial(forward, module))
    for module in dispatched:
        config: Any = module.config
        config._experts_implementation_internal = NAME
    for module in chosen:
        if not frozen:
            unfreeze(module)
            continue
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        freeze(module, _top_k(module, block_of))
    return chosen


def refresh(model: nn.Module) -> None:
    """Read frozen experts again after their values changed."""
    for module in model.modules():
        refresh_module(module)


def _top_k(module: nn.Module, block_of: Mapping[nn.Module, nn.Module]) -> int:
    if module in block_of:
        return int(block_of[module].top_k)  # type: ignore[arg-type]
    config: Any = module.config
    found = [getattr(config, name, None) for name in _TOP_K]
    return next((int(value) for value in found if value), 1)


def _place_of_forward(module: nn.Module) -> str:
    """The attribute that is a module's own forward: accelerate's hooks are around another one."""
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"


def _refuse_replaced(
    modules: list[tuple[str, nn.Module]], forwards: Mapping[nn.Module, Callable[..., Any]]
) -> None:
    """Raise if a module has a forward that somebody put in the place of its class's."""
    for path, module in modules:
        held = vars(module).get(_place_of_forward(module))
        if module not in forwards or held is None or isinstance(held, MethodType):
            continue
        if getattr(held, "func", None) is not forwards[module]:
            raise NotImplementedError(
                f"moec.transformers: {path} has the forward {held!r} in the place of its class's; "
                "put it there after enable()"
            )


def _refuse_left_out(
    modules: list[tuple[str, nn.Module]], blocks: Collection[nn.Module], chosen: list[nn.Module]
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
