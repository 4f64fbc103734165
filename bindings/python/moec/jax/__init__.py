# SPDX-License-Identifier: Apache-2.0
"""moec in JAX: functions under jit and grad, on the CPU and on CUDA, through XLA's FFI.

    y = moec.jax.layer(x, parameters, router=moec.RouterDesc(...), experts=moec.ExpertsDesc(...))
"""

from ._functions import Routing, experts, layer, route_and_layer

__all__ = ["Routing", "experts", "layer", "route_and_layer"]
