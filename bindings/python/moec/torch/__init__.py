# SPDX-License-Identifier: Apache-2.0
"""moec in PyTorch: modules whose forward and backward are the library's, in eager mode and under
torch.compile, on the CPU and on CUDA.

    layer = moec.torch.MoELayer(moec.RouterDesc(...), moec.ExpertsDesc(...))
    y = layer(x)

The operators are torch.ops.moec.experts and torch.ops.moec.layer, see _ops.
"""

from ._modules import Experts, MoELayer, Routing

__all__ = ["Experts", "MoELayer", "Routing"]
