# SPDX-License-Identifier: Apache-2.0
"""moec in PyTorch: modules whose forward and backward are the library's, in eager mode and under
torch.compile, on the CPU and on CUDA.

    layer = moec.torch.MoELayer(moec.RouterDesc(...), moec.ExpertsDesc(...))
    y = layer(x)

The operators are torch.ops.moec.experts and torch.ops.moec.layer, see _ops.
"""

from ._eps import EP
from ._modules import Experts, MoELayer, Routing
from ._packed import PackedTensor, Store
from ._parallel import clip_grad_norm_, comm, full_state_dict, load_full_state_dict
from ._peft_files import load_adapter, save_adapter

__all__ = [
    "clip_grad_norm_", "comm", "EP", "Experts", "full_state_dict", "load_adapter",
    "load_full_state_dict", "MoELayer", "PackedTensor", "Routing", "save_adapter", "Store",
]
