# SPDX-License-Identifier: Apache-2.0
"""Main gradients of a module's routed matrices: where they are made, and made again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ._constants import constant, module_of


@constant
def complete_main_grads(of: nn.Module | int) -> None:
    """Make the main gradients that are None, as a copy's are, where the parameter is. Not in a
    graph, whose tensors do not outlive it. Raises for parameters that others put there."""
    module: Any = module_of(of)
    for name, parameter in module._routed().items():
        if not parameter.requires_grad:
            continue
        if not hasattr(parameter, "main_grad"):
            raise RuntimeError(
                f"moec.torch: {name} is not the parameter that use_main_grads() gave a main_grad, "
                "as under FSDP2; leave use_main_grads() out, or call it after the change"
            )
        held = parameter.main_grad
        if held is None:
            new_main_grad(parameter, module._main)
        elif held.device != parameter.device:
            parameter.main_grad = held.to(parameter.device)


def new_main_grad(parameter: Tensor, dtype: torch.dtype) -> None:
    parameter.main_grad = torch.zeros_like(  # type: ignore[attr-defined]
        parameter, dtype=dtype, memory_format=torch.contiguous_format
    )
