# SPDX-License-Identifier: Apache-2.0
"""experts() and layer(): custom_vjp around two FFI calls."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from .. import _raw
from .._context import Context
from .._descriptors import ExpertsDesc, RouterDesc, WeightsDesc, to_raw
from .._enums import DType, GateLayout, Orientation, Save
from .._experts import Experts, Sizes
from .._layer import Layer
from .._spec import REQUIRED, ROUTED_WEIGHTS, SHARED_WEIGHTS, WITHOUT_GRADIENT, Spec
from .._tensors import dtype_of

Array: TypeAlias = jax.Array
# These two have no types of their own.
_pycapsule: Any = jax.ffi.pycapsule
_shape: Any = jax.ShapeDtypeStruct
_LIBRARY = Path(__file__).parents[1] / "lib" / "libmoec_jax.so"
_TARGETS = {
    "moec_forward": ("moec_jax_forward", "moec_jax_forward_cuda"),
    "moec_backward": ("moec_jax_backward", "moec_jax_backward_cuda"),
}


def _register() -> None:
    if not _LIBRARY.exists():
        raise ImportError(
            "moec.jax: this build of moec has no XLA handlers; build it with jaxlib's headers "
            "(MOEC_XLA_INCLUDE)"
        )
    library = ctypes.CDLL(str(_LIBRARY))
    for target, symbols in _TARGETS.items():
        for platform, symbol in zip(("cpu", "CUDA"), symbols, strict=True):
            handler = _pycapsule(getattr(library, symbol))
            jax.ffi.register_ffi_target(target, handler, platform=platform)


_register()


class Routing(NamedTuple):
    """What a layer decided about each token."""

    logits: Array
    """[T,E+Z] f32, differentiable"""
    expert_ids: Array
    """[T,K] i32; -1 = none"""
    routing_weights: Array
    """[T,K] f32, not differentiable: gradients start at the logits only"""


class _Static(NamedTuple):
    """What a traced call is about beside its arrays."""

    spec: str
    names: tuple[str, ...]
    save: Save
    platform: str


def _hex(desc: Any, kind: type) -> str:
    raw = to_raw(desc, kind)
    return ctypes.string_at(int(raw.this), raw.struct_size).hex()


@lru_cache(maxsize=256)
def _sizes(spec: str, dtype: DType, save: Save, platform: str) -> Sizes:
    made = Spec.parse(spec)
    context = _context(platform)
    desc = replace(made.experts, dtype=dtype, save=save)
    if made.router is None:
        return Experts(context, desc).sizes
    return Layer(context, replace(made.router, data_dtype=dtype), desc).sizes


@lru_cache(maxsize=8)
def _context(platform: str) -> Context:
    return Context("cpu" if platform == "cpu" else "cuda")


def _weights(spec: Spec, arrays: Mapping[str, Array], shared: bool) -> str:
    """The descriptor of a set of matrices, as text; empty when there is none."""
    names = SHARED_WEIGHTS if shared else ROUTED_WEIGHTS
    if shared and not arrays.keys() & set(names):
        return ""
    down = arrays.get(names[3])
    if down is None:
        raise TypeError(f"moec.jax: {names[3]} is missing; it gives the sizes")
    biases = [arrays[n] for n in names[4:] if n in arrays]
    out_in = Orientation.OUT_IN
    rows = out_in if shared else spec.down_orientation
    hidden, inter = down.shape[1:] if rows == out_in else down.shape[:0:-1]
    return _hex(WeightsDesc(
        num_experts=down.shape[0], hidden=hidden, inter=inter,
        gate_layout=spec.shared_gate_layout if shared else spec.gate_layout,
        gate_up_orientation=out_in if shared else spec.gate_up_orientation,
        down_orientation=rows, dtype=dtype_of(down),
        bias_dtype=dtype_of(biases[0]) if biases else 0,
    ), _raw.moec_weights_desc)


def _call(target: str, static: _Static, arrays: dict[str, Array], outputs: dict[str, Any]
          ) -> dict[str, Array]:
    spec, dtype = Spec.parse(static.spec), dtype_of(arrays["x"])
    router = ""
    if spec.router is not None:
        router = _hex(replace(spec.router, data_dtype=dtype), _raw.moec_router_desc)
    desc = replace(spec.experts, dtype=dtype, save=static.save)
    function = jax.ffi.ffi_call(target, tuple(outputs.values()), vmap_method="sequential")
    found = function(
        *arrays.values(), router=router, experts=_hex(desc, _raw.moec_experts_desc),
        weights=_weights(spec, arrays, False), shared=_weights(spec, arrays, True),
        inputs=",".join(arrays), outputs=",".join(outputs),
    )
    return dict(zip(outputs, found, strict=True))


def _forward(static: _Static, arrays: dict[str, Array]) -> dict[str, Array]:
    spec, x = Spec.parse(static.spec), arrays["x"]
    tokens, desc = x.shape[0], spec.experts
    outputs: dict[str, Any] = {"y": _shape(x.shape, x.dtype)}
    if spec.router is not None:
        ids = desc.num_experts + desc.num_zero_experts
        outputs |= {
            "logits": _shape((tokens, ids), jnp.float32),
            "expert_ids": _shape((tokens, desc.top_k), jnp.int32),
            "routing_weights": _shape((tokens, desc.top_k), jnp.float32),
        }
    if static.save != Save.NONE:
        sizes = _sizes(static.spec, dtype_of(x), static.save, static.platform)
        outputs["saved"] = _shape((sizes.saved.bytes(tokens),), jnp.uint8)
    return _call("moec_forward", static, arrays, outputs)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(static: _Static, values: tuple[Array, ...]) -> dict[str, Array]:
    inference = static._replace(save=Save.NONE)
    return _forward(inference, dict(zip(static.names, values, strict=True)))


def _run_forward(static: _Static, values: tuple[Array, ...]) -> tuple[dict[str, Array], Any]:
    if static.save == Save.NONE:
        raise ValueError(
            "moec.jax: Save.NONE keeps nothing for gradients; choose save=Save.INPUT, PREACT or ALL"
        )
    outputs = _forward(static, dict(zip(static.names, values, strict=True)))
    saved = outputs.pop("saved")
    return outputs, (saved, values)


def _run_backward(static: _Static, kept: Any, d_outputs: dict[str, Array]) -> tuple[Any]:
    saved, values = kept
    arrays = dict(zip(static.names, values, strict=True))
    wanted = {n: _shape(a.shape, a.dtype) for n, a in arrays.items()
              if n not in WITHOUT_GRADIENT}
    given = arrays | {"saved": saved, "d_y": d_outputs["y"]}
    if "logits" in d_outputs:
        given["d_logits_in"] = d_outputs["logits"]
    found = _call("moec_backward", static, given, wanted)
    return (tuple(found.get(name) for name in static.names),)


_run.defvjp(_run_forward, _run_backward)


def _start(spec: Spec, arrays: Mapping[str, Any], save: Save, platform: str | None
           ) -> dict[str, Array]:
    given = {n: jnp.asarray(a) for n, a in arrays.items() if a is not None}
    for name in ("routing_weights", "select_bias"):
        if name in given:
            given[name] = given[name].astype(jnp.float32)
    missing = [n for n in spec.inputs if n in REQUIRED and n not in given]
    if missing:
        raise TypeError(f"moec.jax: {missing[0]} is None; an array is needed")
    unknown = sorted(given.keys() - set(spec.inputs))
    if unknown:
        raise TypeError(f"moec.jax: no input {unknown[0]!r}; {', '.join(spec.inputs)} exist")
    shape = given["x"].shape
    for name in ("x", "router_x"):
        if name in given:
            given[name] = given[name].reshape(-1, given[name].shape[-1])
    static = _Static(spec.text(), tuple(given), save, platform or jax.default_backend())
    outputs = _run(static, tuple(given.values()))
    return outputs | {"y": outputs["y"].reshape(shape)}


def experts(
    x: Array,
    expert_ids: Array,
    routing_weights: Array,
    parameters: Mapping[str, Array],
    *,
    desc: ExpertsDesc,
    gate_layout: GateLayout = GateLayout.GATE_THEN_UP,
    gate_up_orientation: Orientation = Orientation.OUT_IN,
    down_orientation: Orientation = Orientation.OUT_IN,
    shared_gate_layout: GateLayout = GateLayout.SPLIT,
    save: Save = Save.PREACT,
    platform: str | None = None,
) -> Array:
    """y [...,H] of x [...,H], expert_ids [T,K] and routing_weights [T,K]; differentiable in x, the
    routing weights and the parameters.

    parameters  matrices and biases by name: gate_up [E,2I,H] or gate and up, down [E,H,I], ...
    save        what a differentiated call keeps for its backward
    platform    "cpu" or "gpu" where it is not JAX's default backend
    """
    spec = Spec.of(desc, None, gate_layout, gate_up_orientation, down_orientation,
                   shared_gate_layout, plain=True)
    given = {"x": x, "expert_ids": expert_ids, "routing_weights": routing_weights}
    return _start(spec, given | dict(parameters), save, platform)["y"]


def route_and_layer(
    x: Array,
    parameters: Mapping[str, Array],
    *,
    router: RouterDesc,
    experts: ExpertsDesc,
    gate_layout: GateLayout = GateLayout.GATE_THEN_UP,
    gate_up_orientation: Orientation = Orientation.OUT_IN,
    down_orientation: Orientation = Orientation.OUT_IN,
    shared_gate_layout: GateLayout = GateLayout.SPLIT,
    save: Save = Save.PREACT,
    platform: str | None = None,
    **inputs: Array,
) -> tuple[Array, Routing]:
    """layer(), with the routing. Gradients start at y and at the routing's logits."""
    if router.jitter > 0:
        raise NotImplementedError(
            f"moec.jax: the router has jitter {router.jitter:g}, which needs new noise in each "
            "call; 0 is supported, and moec.torch has jitter"
        )
    spec = Spec.of(experts, router, gate_layout, gate_up_orientation, down_orientation,
                   shared_gate_layout, plain=True)
    found = _start(spec, {"x": x} | dict(parameters) | inputs, save, platform)
    weights = jax.lax.stop_gradient(found["routing_weights"])
    return found["y"], Routing(found["logits"], found["expert_ids"], weights)


def layer(x: Array, parameters: Mapping[str, Array], **options: Any) -> Array:
    """y [...,H] of x [...,H] through router and experts.

    parameters  gate_weight [E+Z,H], the matrices of the experts, and what the descriptors ask for
    options     router, experts, layouts, save and platform as in route_and_layer(); router_x,
                token_mask, table, token_ids, given_ids as in moec.Layer.forward
    """
    return route_and_layer(x, parameters, **options)[0]
