# SPDX-License-Identifier: Apache-2.0
"""What a traced graph takes for a constant: the result of a function about a module."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

Function = TypeVar("Function", bound=Callable[..., Any])
constant: Callable[[Function], Function] = torch._dynamo.assume_constant_result
# Before torch 2.13 its arguments may not be modules: there it gets the id of the module, which
# lives while it is traced.
_MODULES_ARE_CONSTANT = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"


def traceable(module: nn.Module) -> nn.Module | int:
    """The argument that such a function can have for a module."""
    if _MODULES_ARE_CONSTANT or not torch.compiler.is_compiling():
        return module
    return id(module)


def module_of(traced: nn.Module | int) -> nn.Module:
    """The module of traceable()."""
    if isinstance(traced, nn.Module):
        return traced
    found: nn.Module = ctypes.cast(traced, ctypes.py_object).value
    return found
