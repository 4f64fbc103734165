# SPDX-License-Identifier: Apache-2.0
"""PEFT's LoRA on the parameters of experts, as low-rank terms of moec's products.

PEFT wraps an experts module once for each targeted parameter (ParamWrapper), and each wrapper adds
its product B A to the whole stack before the call. The forward of that class is replaced here:
where the innermost module runs on moec, the outermost wrapper collects the factors of all of them
and calls the module itself. Everything else takes the forward that was there before, PEFT's or
what others put in its place.
"""

from __future__ import annotations

import inspect
import warnings
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from ..torch import _adapted
from ..torch._peft_files import is_a_first
from ._experts import FIELDS, MATRICES, call_with_adapters, is_served
from ._packed import is_in_out

_warned: set[tuple[str, float]] = set()
_NONE: dict[str, Any] = {}


def _chain(wrapper: Any, kind: type) -> tuple[list[Any], nn.Module]:
    """The wrappers of one module, from the outermost, and the module."""
    found = []
    while isinstance(wrapper, kind):
        found.append(wrapper)
        wrapper = wrapper._modules["base_layer"]  # nn.Module's __getattr__ takes far longer
    return found, wrapper


def _add_terms(
    wrapper: Any, in_out: bool, terms: list[_adapted.Term], factors: list[Tensor]
) -> None:
    """Append the active terms of a wrapper's parameter. PEFT's lora_A is beside the last dimension
    where it exchanged the two, else beside the middle one; where that is the output (Llama-4;
    before PEFT 0.19.1 all others), A and B change places."""
    if wrapper.merged:
        if wrapper.disable_adapters:
            wrapper.unmerge()
        return
    if wrapper.disable_adapters:
        return
    own, place = vars(wrapper), FIELDS[wrapper.parameter_name]
    is_turned = in_out == bool(own.get("_did_swap_in_out_features", False))
    index = [term.place for term in terms].count(place)
    lora_a, lora_b = own["_modules"]["lora_A"]._modules, own["_modules"]["lora_B"]._modules
    for name in wrapper.active_adapters:
        if name in lora_a:
            if "_moec_exchanged" in own:
                _refuse_exchanged(wrapper, name)
            try:
                a, b = lora_a[name]._parameters["weight"], lora_b[name]._parameters["weight"]
            except KeyError:  # parametrised, or of FSDP
                a, b = lora_a[name].weight, lora_b[name].weight
            if a.is_meta or b.is_meta:
                raise RuntimeError(
                    f"moec.transformers: adapter {name!r} of {wrapper.parameter_name} has no values"
                    ": its factors are on the meta device, where PEFT leaves them beside experts "
                    "that accelerate has offloaded; keep these experts on a device")
            factors += (a, b)
            terms.append(_adapted.Term(index, place, float(wrapper.scaling[name]),
                                       _adapted.PEFT_EXCHANGED if is_turned else _adapted.PEFT))
            index += 1


def _note_exchanged(wrapper: Any, name: str, config: Any) -> None:
    """Note an adapter of a square matrix whose A lies beside the other dimension than this PEFT
    reads it, as PEFT before 0.19.1 wrote some: no shape tells them apart. Factors of linear layers,
    which PEFT puts together, are as they were."""
    version = getattr(config, "peft_version", None)
    is_transposed = bool(getattr(wrapper.get_base_layer(), "is_transposed", False))
    is_of_layers = wrapper.parameter_name in getattr(config, "_moec_of_layers", ())
    is_misread = is_a_first(version, is_transposed) == bool(
        vars(wrapper).get("_did_swap_in_out_features", False))
    if is_misread and not is_of_layers and wrapper.get_param().ndim == 3 and (
            wrapper.in_features == wrapper.out_features):
        wrapper.__dict__.setdefault("_moec_exchanged", {})[name] = str(version)


def _refuse_exchanged(wrapper: Any, name: str) -> None:
    written = vars(wrapper).get("_moec_exchanged", _NONE).get(name)
    if written is not None:
        raise ValueError(
            f"moec.transformers: adapter {name!r} is of PEFT {written}, which exchanged the "
            f"factors of the square {wrapper.parameter_name}; PEFT misreads them. "
            "moec.transformers.convert_adapter() writes it as PEFT from 0.19.1 on reads it"
        )


def _warn_of_converted(wrappers: list[Any]) -> None:
    """Warn of adapters whose ranks of gate and up were put together: PEFT doubles rank and alpha
    then, and alpha / sqrt(r) becomes sqrt(2) times what was trained."""
    if not any([any(vars(wrapper).get("use_rslora", _NONE).values()) for wrapper in wrappers]):
        return
    held = {wrapper.parameter_name: wrapper for wrapper in wrappers}
    both, down = held.get("gate_up_proj"), held.get("down_proj")
    if both is None or down is None:
        return
    for name, is_rslora in vars(both).get("use_rslora", {}).items():
        if not is_rslora or name not in both.lora_A or name not in down.lora_A:
            continue
        doubled = (both.r[name], both.lora_alpha[name]) == (2 * down.r[name],
                                                          2 * down.lora_alpha[name])
        key = (name, float(both.scaling[name]))
        if doubled and key not in _warned:
            _warned.add(key)
            warnings.warn(
                f"moec.transformers: adapter {name!r} has rank and alpha of gate_up_proj twice "
                f"those of down_proj, with rslora: if it was converted from gate_proj and up_proj, "
                f"PEFT's scale {key[1]:.4f} is sqrt(2) times the trained {key[1] / 2**0.5:.4f}",
                stacklevel=3,
            )


def _call(wrappers: list[Any], module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The innermost module with the terms of all wrappers."""
    kwargs.pop("adapter_names", None)
    _warn_of_converted(wrappers)
    in_out = is_in_out(module)
    terms: list[_adapted.Term] = []
    factors: list[Tensor] = []
    for wrapper in wrappers:
        _add_terms(wrapper, in_out, terms, factors)
    return call_with_adapters(module, terms, factors, x, *args, **kwargs)


_break = torch.compiler.disable(_call)  # of a traced graph, one a module


def install(kind: Any) -> None:
    """Replace the forward of PEFT's ParamWrapper, once."""
    before = kind.forward
    if getattr(before, "is_moec", False):
        return

    @wraps(before)
    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if "_is_replica" in vars(self):
            raise RuntimeError(
                "adapters of experts in a copy that torch.nn.DataParallel made (Trainer makes them "
                "where it sees several GPUs), which has no parameters; expected one process a GPU: "
                "start with torchrun, or set CUDA_VISIBLE_DEVICES to one GPU")
        wrappers, module = _chain(self, kind)
        is_own = MATRICES.issuperset([wrapper.parameter_name for wrapper in wrappers])
        if not is_own or not is_served(module) or kwargs.get("adapter_names") is not None:
            return before(self, x, *args, **kwargs)
        call = _break if torch.compiler.is_compiling() else _call
        return call(wrappers, module, x, *args, **kwargs)

    forward.is_moec = True  # type: ignore[attr-defined]
    kind.forward = forward
    if hasattr(kind, "update_layer"):
        _look_at_new(kind)


def _look_at_new(kind: Any) -> None:
    """Refuse, when it is attached, an adapter whose factors PEFT would read exchanged."""
    before = kind.update_layer
    signature = inspect.signature(before)

    @wraps(before)
    def update_layer(self: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        found = before(self, adapter_name, *args, **kwargs)
        given = signature.bind(self, adapter_name, *args, **kwargs).arguments
        _note_exchanged(self, adapter_name, given.get("config"))
        if is_served(_chain(self, kind)[1]):
            _refuse_exchanged(self, adapter_name)
        return found

    kind.update_layer = update_layer


def _parameters(config: Any) -> set[str]:
    """The parameters that a config targets; not every kind of it has some."""
    return set(getattr(config, "target_parameters", None) or ())


def _look_at_converted() -> None:
    """Note in a config which parameters PEFT made of the linear layers of single experts."""
    from peft.utils import (  # type: ignore[import-not-found, unused-ignore]
        transformers_weight_conversion as conversion,
    )

    before = conversion.convert_peft_config_for_transformers
    if getattr(before, "is_moec", False):
        return

    @wraps(before)
    def convert_peft_config_for_transformers(peft_config: Any, *args: Any, **kwargs: Any) -> Any:
        given = _parameters(peft_config)
        found = before(peft_config, *args, **kwargs)
        made = _parameters(peft_config) - given
        peft_config._moec_of_layers = made | getattr(peft_config, "_moec_of_layers", set())
        return found

    convert_peft_config_for_transformers.is_moec = True  # type: ignore[attr-defined]
    conversion.convert_peft_config_for_transformers = convert_peft_config_for_transformers


def install_if_there() -> None:
    """Serve PEFT's adapters where it is installed and has them on parameters."""
    try:
        from peft.tuners.lora import layer  # type: ignore[import-not-found, unused-ignore]
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        return
    if hasattr(layer, "ParamWrapper"):
        install(layer.ParamWrapper)
    if find_spec("peft.utils.transformers_weight_conversion"):
        _look_at_converted()
