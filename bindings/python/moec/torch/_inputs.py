# SPDX-License-Identifier: Apache-2.0
"""The inputs of an operator's call: what is refused, main gradients, and autocast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .._spec import REQUIRED, ROUTED_WEIGHTS, SHARED_WEIGHTS
from .._tensors import kind_of

Given = Mapping[str, Tensor]
"""the inputs of a call, by name"""


def refuse(inputs: Sequence[str], given: Given) -> None:
    """Raise, naming the input, for what is missing, unknown or no tensor."""
    for name in inputs:
        if name in REQUIRED and name not in given:
            raise TypeError(f"moec.torch: {name} is None; a torch.Tensor is needed")
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"moec.torch: {name} is {kind_of(value)}; a torch.Tensor is needed"
            )
        if name not in inputs:
            raise TypeError(f"moec.torch: no input {name!r}; {', '.join(inputs)} exist")


def refuse_devices(given: Given, factors: Sequence[Tensor]) -> None:
    """Raise where one is not on x's device: with one on meta, kernels would run on none."""
    device = given["x"].device
    for name, tensor in (*given.items(), *((f"factor {i}", t) for i, t in enumerate(factors))):
        if tensor.device != device:
            raise RuntimeError(
                f"moec.torch: {name} is on {tensor.device}, x on {device}; one device is needed"
            )


def main_gradients(tensors: Given, main_grads: Sequence[Tensor]) -> dict[str, Tensor]:
    """Main gradients by name: one for each routed matrix or bias that is given, in order, without
    those of size 0. Raises ValueError unless each is compact and of the parameter's shape."""
    given = {n: tensors[n] for n in ROUTED_WEIGHTS if n in tensors}
    if len(given) != len(main_grads):
        raise ValueError(f"moec.torch: {len(main_grads)} main gradients for {', '.join(given)}")
    found = {n: main for n, main in zip(given, main_grads, strict=True) if main.numel()}
    for name, main in found.items():
        if main.shape != given[name].shape or not main.is_contiguous():
            raise ValueError(
                f"moec.torch: the main gradient of {name} has the shape {list(main.shape)} and the "
                f"strides {list(main.stride())}; contiguous {list(given[name].shape)} is needed"
            )
    return found


def autocast(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Under autocast x and the matrices go to its type, as those of a linear layer do; what
    decides about routing to fp32. Experts in fp32 stay: products beside x round their matrices,
    which are the values of a cast, and add their biases as they are."""
    kept = {"routing_weights", "select_bias", "per_expert_scale", "gate_bias", "input_scale"}
    for names in (ROUTED_WEIGHTS, SHARED_WEIGHTS):
        if all(tensors[n].dtype == torch.float32 for n in names if n in tensors):
            kept.update(names)
    return {n: t.to(torch.float32 if n in kept else dtype)
            if t.is_floating_point() else t for n, t in tensors.items()}
