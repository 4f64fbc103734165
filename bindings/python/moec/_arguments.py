# SPDX-License-Identifier: Apache-2.0
"""Arguments of calls: the arrays that they are given, and room for those that they write."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

from ._adapters import Adapter, Adapters, raw_adapters
from ._enums import DType
from ._fields import INPUTS, ExpertsGradients, LayerGradients
from ._handle import handle_of
from ._tensors import Array, buffer, empty
from ._weights import Weights, WeightSet

Gradients = TypeVar("Gradients", ExpertsGradients, LayerGradients)


def inputs_of(site: str, struct: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All arrays that a call reads, None where absent. Raises TypeError for others."""
    known = INPUTS[struct]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise TypeError(f"moec.{site}: no argument {unknown[0]!r}; {', '.join(known)} exist")
    return {**dict.fromkeys(known), **given}


def pick(makers: Mapping[str, Callable[[], Any]], want: Collection[str]) -> dict[str, Any]:
    """Make the wanted entries; a name that does not exist raises."""
    if isinstance(want, str):
        raise TypeError(f"moec: want is a str; names are needed, as in [{want!r}]")
    unknown = sorted(set(want) - set(makers))
    if unknown:
        raise ValueError(f"moec: want has {unknown[0]!r}; {', '.join(makers)} exist")
    return {name: makers[name]() for name in want}


def set_buffers(
    args: Any, keep: list[Any], *, write: bool = True, stream: int = 0, **arrays: Array | None
) -> None:
    """Fill moec_buffer fields from arrays; None leaves a field absent."""
    for name, array in arrays.items():
        if array is not None:
            setattr(args, name, buffer(array, keep, name, write=write, stream=stream))


def set_weight_gradients(
    args: Any,
    keep: list[Any],
    experts: WeightSet | None,
    shared: WeightSet | None,
    stream: int,
) -> None:
    """Point d_expert_weights and d_shared_weights at weight sets; None = frozen."""
    for name, value in (("d_expert_weights", experts), ("d_shared_weights", shared)):
        if value is not None:
            raw = value.raw(keep, write=True, stream=stream)
            keep.append(raw)
            setattr(args, name, raw)


def set_adapters(args: Any, adapters: Adapters | None) -> None:
    """Point `adapters` at a set of them; None = none."""
    if adapters is not None:
        args.adapters = handle_of("adapters", adapters, Adapters)


def set_adapter_gradients(
    args: Any, keep: list[Any], given: Sequence[Adapter] | None, adapters: Adapters | None,
    stream: int,
) -> None:
    """Point d_adapters at one Adapter of gradients for each that is bound; None = frozen."""
    if given is None:
        return
    bound = 0 if adapters is None else len(adapters.held)
    if len(given) != bound:
        raise ValueError(f"moec: d_adapters has {len(given)} adapters; {bound} are bound")
    args.d_adapters = raw_adapters(given, keep, "d_adapters", write=True, stream=stream)


def new_gradients(
    kind: type[Gradients],
    want: Collection[str],
    d_y: Array,
    *,
    inputs: Mapping[str, Any],
    weights: Weights,
    shared_weights: Weights | None,
    adapters: Adapters | None,
    routing_shape: tuple[int, ...],
    dtype: Any,
) -> Gradients:
    """Room for the wanted gradients. Those of parameters are of `dtype`, or of the parameter's;
    those of inputs that were not given are None."""
    sets = {"expert_weights": weights, "shared_weights": shared_weights}

    def make(name: str) -> Any:
        if name == "adapters":
            return None if adapters is None else [a.empty_like(dtype) for a in adapters.held]
        if name in sets:
            held = sets[name]
            return None if held is None else _gradient_like(held, dtype)
        if name == "routing_weights":
            return empty(routing_shape, DType.F32, d_y)
        if name in ("x", "residual"):
            return empty(tuple(d_y.shape), d_y, d_y)
        array = inputs[name]
        if array is None:
            return None
        like = array if name == "router_x" else dtype or array
        return empty(tuple(array.shape), like, array)

    makers = {item.name: partial(make, item.name) for item in fields(kind)}
    return kind(**pick(makers, want))


def _gradient_like(weights: Weights, dtype: Any) -> WeightSet:
    """Arrays for the gradients of bound weights. ValueError when they hold no arrays."""
    if weights.set is None:
        raise ValueError("moec: these weights hold no arrays; give the gradients' arrays")
    return weights.set.empty_like(dtype)
