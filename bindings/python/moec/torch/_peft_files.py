# SPDX-License-Identifier: Apache-2.0
"""Adapters in the two files that PEFT writes, without PEFT.

PEFT wraps a module once for each parameter, and a key says how deep a wrapper lies, not whose it
is. Which of the two is inside depends on the base, so that matrices are told by their shapes here.
How factors are stored is said by Factors.from_peft. PEFT before 0.19.1 took the dimensions of
stacks [E,out,in] in their order, and wrote lora_A beside `out`.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._adapters import Factors
from .._enums import GateLayout
from ._lora import AdaptedModule, Factor, extents, is_in_out, matrices_of

PREFIX = "base_model.model."
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
WRITTEN = "0.19.1"
"""the release as whose files adapters are written: PEFT reads such ones from it on"""
KEY = re.compile(r"^(?P<path>.*?)(?P<depth>(\.base_layer)*)\.lora_(?P<part>[AB])(\.\w+)?\.weight$")
_EXPERT = re.compile(r"^(?P<path>.*)\.(?P<expert>\d+)\.(?P<leaf>\w+)$")
_LEAVES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down",
           "w1": "gate", "w3": "up", "w2": "down"}
_REFUSED = ("use_dora", "lora_bias", "fan_in_fan_out")


def _adapted_of(model: nn.Module) -> dict[str, Any]:
    """The modules that can have adapters by the paths of their experts in PEFT's files."""
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, AdaptedModule):
            if not path:
                raise ValueError("moec.torch: model is the module of experts itself, which has no "
                                 "path in PEFT's files; a model that holds it is needed")
            found[path if module._spec.router is None else f"{path}.experts"] = module
    if not found:
        raise ValueError(
            "moec.torch: the model has no Experts or MoELayer of moec.torch; a transformers model "
            "takes adapters by PEFT: PeftModel.from_pretrained")
    return found


def is_a_first(version: Any, is_transposed: bool = False) -> bool | None:
    """Whether this release of PEFT wrote lora_A beside the first dimension of each matrix of a
    stack, whose module says is_transposed of [E,in,out]; None: it is no release. Right is beside
    the input, which 0.19.0 had the wrong way round, and those before took for the first."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", str(version or ""))
    if found is None:
        return None
    number = tuple(int(part or 0) for part in found.groups())
    return number < (0, 19, 0) or is_transposed != (number == (0, 19, 0))


def as_stored(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """PEFT's lora_A [E r,in] and lora_B [out,r E] of factors a [E,r,in] and b [E,out,r]."""
    return (a.reshape(-1, a.shape[2]).contiguous(),
            b.permute(1, 2, 0).reshape(b.shape[1], -1).contiguous())


def save_adapter(model: nn.Module, folder: Any, name: str = "default") -> None:
    """Write adapter `name` of all modules of experts in a model as PEFT 0.19.1 and later do, for
    a model of transformers whose experts have the same paths. Raises ValueError where there is
    none, and NotImplementedError for factors of gate and up apart, which PEFT has as one."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    factors: dict[str, Factor] = {}
    for path, module in _adapted_of(model).items():
        held = module.adapters[name] if name in (module._modules.get("adapters") or ()) else {}
        for depth, (matrix, factor) in enumerate(reversed(list(held.items()))):
            if matrix not in ("gate_up", "down"):
                raise NotImplementedError(
                    f"moec.torch: adapter {name!r} has factors of {matrix} in {path}; PEFT has "
                    "parameters gate_up_proj and down_proj")
            key = f"{PREFIX}{path}{'.base_layer' * depth}"
            a, b = factor.a.detach(), factor.b.detach()
            for part, stored in zip("AB", as_stored(a, b), strict=True):
                tensors[f"{key}.lora_{part}.weight"] = stored.cpu()
            factors[f"{path}.{matrix}_proj"] = factor
    if not factors:
        raise ValueError(f"moec.torch: no module of the model has an adapter {name!r}")
    forms = {factor.rslora for factor in factors.values()}
    if len(forms) > 1:
        raise NotImplementedError(f"moec.torch: adapter {name!r} has factors with rslora and "
                                  "without; PEFT's files say it once")
    first = next(iter(factors.values()))
    config = {
        "peft_type": "LORA", "r": first.rank, "lora_alpha": first.alpha,
        "use_rslora": first.rslora, "peft_version": WRITTEN, "target_modules": [],
        "target_parameters": sorted({".".join(p.split(".")[-2:]) for p in factors}),
        "rank_pattern": {p: f.rank for p, f in factors.items() if f.rank != first.rank},
        "alpha_pattern": {p: f.alpha for p, f in factors.items() if f.alpha != first.alpha},
        "bias": "none", "lora_dropout": 0.0, "inference_mode": True,
    }
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / WEIGHTS, {"format": "pt"})
    (target / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def load_adapter(
    model: nn.Module, folder: Any, name: str = "default", *,
    paths: Mapping[str, str] | None = None, strict: bool = True,
) -> list[str]:
    """Add what PEFT wrote as adapter `name` to the modules of experts in a model; active.

    paths   the experts' path in the file -> the module's in the model, where they differ
    strict  raises for tensors that are of no module of experts; else their names are returned

    Takes both nestings, files of PEFT before 0.19.1, and adapters of single experts' linear layers
    as transformers 4 had them. Raises ValueError, naming it, for what does not fit."""
    from safetensors.torch import load_file

    config = json.loads((Path(folder) / CONFIG).read_text())
    refused = [key for key in _REFUSED if config.get(key)]
    if refused or config.get("peft_type") != "LORA":
        raise NotImplementedError(
            f"moec.torch: the adapter is {config.get('peft_type')} with "
            f"{', '.join(refused) or 'nothing more'}; plain LoRA can be read")
    tensors = load_file(Path(folder) / WEIGHTS)
    modules = _adapted_of(model)
    given = {at: there.removesuffix(".experts") for at, there in (paths or {}).items()}
    by_path = {path.removesuffix(".experts"): module for path, module in modules.items()}
    pairs: dict[str, dict[str, dict[str, tuple[str, Tensor]]]] = {}
    unused = []
    for key, tensor in tensors.items():
        match = KEY.match(key.removeprefix(PREFIX))
        at, where = ("", "") if match is None else (match["path"], match["depth"])
        single = _EXPERT.match(at)
        if single and single["leaf"] in _LEAVES:
            at, where = single["path"], f"{single['expert']}.{_LEAVES[single['leaf']]}"
        module_path = given.get(at, at).removesuffix(".experts")
        if match is None or module_path not in by_path:
            unused.append(key)
            continue
        pairs.setdefault(f"{module_path}\n{at}", {}).setdefault(where, {})[match["part"]] = (
            key, tensor)
    if strict and unused:
        raise ValueError(f"moec.torch: {unused[0]} and {len(unused) - 1} more are of no module of "
                         f"experts; the model has {', '.join(modules)}")
    if not pairs:
        raise ValueError("moec.torch: the adapter has no factors of experts")
    for both, found in pairs.items():
        module_path, at = both.split("\n")
        _read(by_path[module_path], name, at, found, config)
    return unused


def _read(module: Any, name: str, path: str, found: Any, config: Mapping[str, Any]) -> None:
    for where, parts in found.items():
        if set(parts) != {"A", "B"}:
            raise ValueError(f"moec.torch: {next(iter(parts.values()))[0]} is alone; lora_A and "
                             "lora_B are needed")
    spec = module._spec
    singles = any("." in where and where[0] != "." for where in found)
    made = _of_singles(spec, path, found, config) if singles else _of_stacks(
        spec, path, found, config)
    like = module._device()
    for factor in made.values():
        factor.to(like)
    module._enter(name, {matrix: made[matrix] for matrix in matrices_of(spec) if matrix in made})


def _pattern(config: Mapping[str, Any], field: str, default: str, path: str) -> Any:
    for key, value in (config.get(field) or {}).items():
        if re.match(rf"(.*\.)?({key})$", path):
            return value
    return config[default]


def _factor(config: Mapping[str, Any], path: str, a: Tensor, b: Tensor) -> Factor:
    alpha = float(_pattern(config, "alpha_pattern", "lora_alpha", path))
    return Factor(a.contiguous(), b.contiguous(), alpha, bool(config.get("use_rslora")))


# ---- stacks
def _of_stacks(spec: Any, path: str, found: Any, config: Mapping[str, Any]) -> dict[str, Factor]:
    """Factors of PEFT's wrappers around a module, by matrix."""
    count = spec.experts.num_experts
    fits: dict[str, tuple[str, list[bool]]] = {}
    for where, parts in found.items():
        (key, a), (_, b) = parts["A"], parts["B"]
        rows, shape = len(a), (a.shape[-1], b.shape[0])
        whole = a.dim() == b.dim() == 2 and rows % count == 0 and b.shape[1] == rows > 0
        near = [(m, turned) for m in matrices_of(spec) for turned in (False, True)
                if whole and shape == extents(spec, m)[:: -1 if turned else 1]]
        if not near:
            wanted = " or ".join(f"[{count} r,{i}] and [{o},{count} r]" for i, o in
                                 (extents(spec, m) for m in matrices_of(spec)))
            raise ValueError(f"moec.torch: {key} is {list(a.shape)} beside {list(b.shape)}; "
                             f"{wanted} are needed")
        fits[where] = near[0][0], [turned for _, turned in near]
    certain = {kinds[0] for _, kinds in fits.values() if len(kinds) == 1}
    if len(certain) > 1:
        raise ValueError(f"moec.torch: of the adapter's factors of {path} one has the dimensions "
                         "of its stack exchanged and one has not")
    made: dict[str, Factor] = {}
    for where, (matrix, _) in fits.items():
        (key, a), (_, b) = found[where]["A"], found[where]["B"]
        turned = certain.copy().pop() if certain else _is_turned(spec, matrix, key, config)
        held = Factors.from_peft(a, b, count, 1.0, exchanged=turned)
        if matrix in made:
            raise ValueError(f"moec.torch: {key} is of {matrix}, which has factors already")
        made[matrix] = _factor(config, f"{path}.{matrix}_proj", held.a, held.b)
    _warn_of_doubled(path, made)
    return made


def _is_turned(spec: Any, matrix: str, key: str, config: Mapping[str, Any]) -> bool:
    """Of a square matrix, by the version that wrote it."""
    turned = is_a_first(config.get("peft_version"))
    if turned is None or is_in_out(spec, matrix):
        raise ValueError(
            f"moec.torch: {key} is of a square matrix, and nothing says whether lora_A is beside "
            f"its input: peft_version in {CONFIG} does, for stacks [E,out,in]")
    return turned


def _warn_of_doubled(path: str, made: Mapping[str, Factor]) -> None:
    """What PEFT made of gate_proj and up_proj has twice the rank and alpha, and with rslora a scale
    that is sqrt(2) times the trained one."""
    both, down = made.get("gate_up"), made.get("down")
    if both is None or down is None or not both.rslora:
        return
    if (both.rank, both.alpha) == (2 * down.rank, 2 * down.alpha):
        warnings.warn(
            f"moec.torch: the adapter of {path} has rank and alpha of gate_up_proj twice those of "
            f"down_proj, with rslora: if it was converted from gate_proj and up_proj, its scale "
            f"{both.scale:.4f} is sqrt(2) times the trained {both.scale / 2**0.5:.4f}",
            stacklevel=5)


# ---- linear layers of single experts
def _of_singles(spec: Any, path: str, found: Any, config: Mapping[str, Any]) -> dict[str, Factor]:
    """Stacked factors; of gate and up side by side where the module has one matrix of both."""
    count = spec.experts.num_experts
    by_matrix: dict[str, dict[int, Any]] = {}
    for where, parts in found.items():
        expert, _, matrix = where.partition(".")
        if not expert.isdigit():
            raise ValueError(f"moec.torch: {parts['A'][0]} is of a stack, beside factors of single "
                             "experts")
        by_matrix.setdefault(matrix, {})[int(expert)] = parts
    made: dict[str, Factor] = {}
    for matrix, experts in by_matrix.items():
        absent = sorted(set(range(count)) - experts.keys())
        if absent or len(experts) != count:
            raise ValueError(f"moec.torch: the adapter has {matrix} of {len(experts)} experts of "
                             f"{path}; all {count} are needed")
        a = torch.stack([experts[e]["A"][1] for e in range(count)])
        b = torch.stack([experts[e]["B"][1] for e in range(count)])
        inner, outer = extents(spec, matrix)
        if a.shape[2] != inner or b.shape[1] != outer or a.shape[1] != b.shape[2]:
            raise ValueError(
                f"moec.torch: {experts[0]['A'][0]} is {list(a.shape[1:])} beside "
                f"{list(b.shape[1:])}; [r,{inner}] and [{outer},r] are needed")
        leaf = next(leaf for leaf, of in _LEAVES.items() if of == matrix)
        made[matrix] = _factor(config, f"{path}.0.{leaf}", a, b)
    if "gate_up" in matrices_of(spec) and {"gate", "up"} & made.keys():
        made["gate_up"] = _joined(spec, made.pop("gate", None), made.pop("up", None))
    return made


def _joined(spec: Any, gate: Factor | None, up: Factor | None) -> Factor:
    """One term of the ranks of both, with their scales."""
    ranks = [0 if one is None else one.rank for one in (gate, up)]
    held = [one for one in (gate, up) if one is not None]
    count, inter = spec.experts.num_experts, spec.experts.inter
    scale, like = held[0].scale, held[0].b
    b = like.new_zeros((count, 2 * inter, sum(ranks)))
    interleaved = spec.gate_layout == GateLayout.INTERLEAVED
    halves = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (
        slice(inter), slice(inter, None))
    with torch.no_grad():
        for one, rows, columns in zip(
            (gate, up), halves, (slice(ranks[0]), slice(ranks[0], None)), strict=True
        ):
            if one is not None:
                b[:, rows, columns] = one.b * (one.scale / scale)
        a = torch.cat([one.a for one in held], 1)
    return Factor(a.detach(), b, scale * sum(ranks), False)
