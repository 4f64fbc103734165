# SPDX-License-Identifier: Apache-2.0
"""What moec.torch says of an argument that it cannot take: its name, what it is, what is right."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch_cases import H, make_experts, make_layer

FLOATS = "torch.float32, torch.float16, torch.bfloat16 can be used"
EXPERTS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[object, ...]]] = {
    "x is None; a torch.Tensor": lambda x, ids, w: (None, ids, w),
    "expert_ids is None; a torch.Tensor": lambda x, ids, w: (x, None, w),
    "routing_weights is None; a torch.Tensor": lambda x, ids, w: (x, ids, None),
    "x is a list; a torch.Tensor": lambda x, ids, w: (x.tolist(), ids, w),
    "x is a ndarray; a torch.Tensor": lambda x, ids, w: (x.numpy(), ids, w),
    "expert_ids is a list; a torch.Tensor": lambda x, ids, w: (x, ids.tolist(), w),
    f"x is of torch.float64; {FLOATS}": lambda x, ids, w: (x.double(), ids, w),
    f"x is of torch.int32; {FLOATS}": lambda x, ids, w: (x.int(), ids, w),
    "expert_ids is of torch.int16; torch.int32, torch.int64 can be used":
        lambda x, ids, w: (x, ids.short(), w),
    "x has 0 dimensions; at least 1": lambda x, ids, w: (x[0, 0], ids, w),
}


@pytest.mark.parametrize("text", EXPERTS)
@pytest.mark.parametrize("trained", [False, True])
def test_arguments_of_experts(text: str, trained: bool) -> None:
    weights, ids = torch.randn(3, 8).softmax(-1).topk(2)
    given = EXPERTS[text](torch.randn(3, H), ids, weights)
    experts = make_experts().requires_grad_(trained)
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        experts(*given)


def test_arguments_of_a_layer() -> None:
    layer, x = make_layer(), torch.randn(3, H)
    for text, given in (
        (f"router_x is of torch.float64; {FLOATS}", {"router_x": x.double()}),
        ("token_mask is a list; a torch.Tensor", {"token_mask": [1, 1, 0]}),
        ("token_mask is of torch.int8; torch.uint8, torch.bool",
         {"token_mask": torch.ones(3, dtype=torch.int8)}),
    ):
        with pytest.raises(TypeError, match=re.escape(text)):
            layer(x, **given)
    with pytest.raises(TypeError, match="x is None; a torch.Tensor"):
        layer(None)


@pytest.mark.parametrize("name", ["gate_up", "down", "down_bias"])
def test_parameters_in_double(name: str) -> None:
    experts = make_experts(bias=True)
    setattr(experts, name, nn.Parameter(getattr(experts, name).double()))
    weights, ids = torch.randn(3, 8).softmax(-1).topk(2)
    with pytest.raises(TypeError, match=f"{name} is of torch.float64; {FLOATS}"):
        experts(torch.randn(3, H), ids, weights)
