# SPDX-License-Identifier: Apache-2.0
"""What config.json's quantization_config says of a matrix: the kinds that its tensors can be of,
and what their names do not tell. METHODS has a function for each library."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from .checkpoint import CheckpointError

Config = Mapping[str, Any]
PACKED_BNB = "moec-bitsandbytes"
"""quant_method of bitsandbytes' codes in stacks of experts, which only moec reads"""


@dataclass(frozen=True)
class Declared:
    """Of one matrix."""

    text: str
    """as messages call it"""
    kinds: tuple[str, ...] = ()
    """names in kinds.KINDS; none: a plain matrix"""
    plain: bool = False
    """a plain matrix fits, too"""
    block: tuple[int, int] | None = None
    """of FP8"""
    group: int | None = None
    """inputs that share a scale; 0: all of a row"""


def section_of(config: Config) -> Config | None:
    """The part of config.json that is about quantisation."""
    for name in ("quantization_config", "compression_config"):
        if isinstance(config.get(name), Mapping):
            found: Config = config[name]
            return found
    return None


def declared(config: Config, name: str) -> Declared:
    """What the config says of the matrix `name` (without ".weight": a module's name)."""
    section = section_of(config)
    if section is None:
        return Declared("config.json has no quantization_config", plain=True)
    method = str(section.get("quant_method") or ("modelopt" if "quant_algo" in section else None))
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise CheckpointError(f"quantization_config has the quant_method {method!r}; {known} exist")
    skipped = _fits(_patterns(section), name)
    if skipped:
        return Declared(f"quantization_config leaves {skipped!r} plain", plain=True)
    return METHODS[method](section, name)


def _patterns(section: Config) -> Iterable[str]:
    for key in ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules",
                "llm_int8_skip_modules"):
        yield from map(str, section.get(key) or ())


def _fits(patterns: Iterable[str], name: str) -> str | None:
    """The first pattern that a module's name fits: "re:" and a regular expression, a glob, or a
    part of the dotted name."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            fits = re.match(pattern[3:], name) is not None
        elif "*" in pattern:
            fits = fnmatch(name, pattern) or fnmatch(name, f"{pattern}.*")
        else:
            fits = f".{pattern}." in f".{name}."
        if fits:
            return pattern
    return None


def _bits(section: Config, key: str = "bits") -> None:
    if int(section.get(key, 4)) != 4:
        raise CheckpointError(
            f"quantization_config: {section.get('quant_method')} with {key} {section[key]}; 4 is "
            "supported"
        )


def _group(section: Config) -> int | None:
    size = section.get("group_size")
    return None if size is None else max(int(size), 0)


def _awq(section: Config, _: str) -> Declared:
    _bits(section)
    version = str(section.get("version", "gemm")).lower()
    if version != "gemm":
        raise CheckpointError(f"quantization_config: awq of version {version!r}; gemm is supported")
    return Declared("quantization_config says awq", ("awq",), group=_group(section))


def _gptq(section: Config, _: str) -> Declared:
    _bits(section)
    version = str(section.get("checkpoint_format") or "gptq").lower()
    kinds = {"gptq": "gptq", "gptq_v2": "gptq-v2"}
    if version not in kinds:
        raise CheckpointError(
            f"quantization_config: gptq with the checkpoint_format {version!r}; "
            f"{' and '.join(kinds)} are supported"
        )
    return Declared(f"quantization_config says {version}", (kinds[version],),
                    group=_group(section))


def _bitsandbytes(section: Config, _: str) -> Declared:
    """Plain experts fit: transformers quantises none of those that it stacks."""
    if section.get("load_in_8bit") and not section.get("load_in_4bit"):
        return Declared("quantization_config says bitsandbytes in 8 bits", plain=True)
    return Declared("quantization_config says bitsandbytes", ("bnb",), plain=True)


def _fp8(section: Config, _: str) -> Declared:
    size = section.get("weight_block_size")
    block = None if size is None else (int(size[0]), int(size[1]))
    return Declared(f"quantization_config says {section['quant_method']}", ("fp8-block", "fp8"),
                    block=block)


def _modelopt(section: Config, _: str) -> Declared:
    algorithm = str(section.get("quant_algo"))
    kinds = {"NVFP4": "nvfp4-modelopt", "W4A16_NVFP4": "nvfp4-modelopt", "NVFP4_AWQ":
             "nvfp4-modelopt", "FP8": "fp8", "FP8_PER_CHANNEL_PER_TOKEN": "fp8"}
    if algorithm not in kinds:
        raise CheckpointError(
            f"quantization_config: modelopt with the quant_algo {algorithm!r}; "
            f"{', '.join(kinds)} are supported"
        )
    return Declared(f"quantization_config says modelopt {algorithm}", (kinds[algorithm],))


_CT_FORMATS: dict[str, tuple[str, ...]] = {
    "pack-quantized": ("int4",), "int-quantized": ("int8",), "float-quantized": ("fp8",),
    "naive-quantized": ("fp8", "int8"), "nvfp4-pack-quantized": ("nvfp4",),
    "mxfp4-pack-quantized": ("mxfp4-packed",), "mxfp8-quantized": ("fp8",),
}


def _compressed_tensors(section: Config, name: str) -> Declared:
    groups: list[Config] = list((section.get("config_groups") or {}).values())
    named = [g for g in groups if _fits((t for t in g.get("targets", ()) if t != "Linear"), name)]
    found = named or [g for g in groups if "Linear" in g.get("targets", ())]
    if not found:
        return Declared("quantization_config has no config_group for it", plain=True)
    form = str(found[0].get("format") or section.get("format"))
    if form not in _CT_FORMATS:
        raise CheckpointError(
            f"quantization_config: compressed-tensors with the format {form!r}; "
            f"{', '.join(_CT_FORMATS)} are supported"
        )
    weights: Config = found[0].get("weights") or {}
    if form == "pack-quantized" and int(weights.get("num_bits", 4)) != 4:
        raise CheckpointError(
            f"quantization_config: pack-quantized with num_bits {weights['num_bits']}; 4 is "
            "supported"
        )
    size = weights.get("block_structure")
    if isinstance(size, str):  # as older releases wrote it
        size = [int(extent) for extent in re.findall(r"\d+", size)]
    block = (int(size[0]), int(size[1])) if size else None
    return Declared(f"quantization_config says compressed-tensors {form}", _CT_FORMATS[form],
                    block=block, group=_group(weights))


def _mxfp4(_: Config, __: str) -> Declared:
    return Declared("quantization_config says mxfp4", ("mxfp4",))


METHODS: dict[str, Callable[[Config, str], Declared]] = {
    "mxfp4": _mxfp4, "fp8": _fp8, "fbgemm_fp8": _fp8, "compressed-tensors": _compressed_tensors,
    "awq": _awq, "gptq": _gptq, "bitsandbytes": _bitsandbytes, PACKED_BNB: _bitsandbytes,
    "modelopt": _modelopt,
}
