# SPDX-License-Identifier: Apache-2.0
"""Matrices of codes from a checkpoint's tensors: which kind they are of, all of its tensors, and
the Quant that they make. Nothing is copied but bitsandbytes' offset, a number in a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._enums import DType, Orientation, Scheme
from ._tensors import Array, dtype_of
from ._weights import Matrix, Quant
from .checkpoint import CheckpointError
from .kinds import ACTIVATIONS, BY_NAME, Extents, Kind, kinds_of, name_of, state_of, tensors_of
from .quant_config import Config, Declared, declared


@dataclass
class Coded:
    """A matrix of codes of all experts."""

    kind: Kind
    codes: Matrix
    quant: Quant
    extents: Extents
    """rows and columns of one expert's matrix as it is stored"""
    orientation: Orientation
    tensors: dict[str, list[str]]
    """suffix -> the checkpoint's tensors that it is made of"""

    @property
    def scheme(self) -> Scheme:
        return self.kind.scheme


def find_kind(
    tensors: Mapping[str, Array], name: str, config: Config | None
) -> tuple[Kind | None, Declared]:
    """The kind of a matrix by its tensors, which the config has to agree with; None: it is plain.
    Without a config its tensors alone decide."""
    given = getattr(tensors, "kinds", {}).get(name)  # of a file that says it itself: GGUF
    if given is not None:
        return BY_NAME[given], Declared(f"the file says {given}")
    found = kinds_of(tensors, name)
    if not found and name not in tensors:
        raise CheckpointError(_stored(tensors, name, found))
    if config is None:
        if len(found) > 1:
            names = " and ".join(kind.name for kind in found)
            raise CheckpointError(
                f"{name} can be of {names}: their tensors have the same names; give "
                "the quantization_config, whose checkpoint_format tells"
            )
        return (found[0] if found else None), Declared("there is no config")
    said = declared(config, name.removesuffix(".weight"))
    agreed = [kind for kind in found if kind.name in said.kinds]
    if agreed:
        return agreed[0], said
    if not found and said.plain:
        return None, said
    raise CheckpointError(f"{_stored(tensors, name, found)}; {said.text}")


def _stored(tensors: Mapping[str, Array], name: str, found: Sequence[Kind]) -> str:
    """What the keys say, for a message."""
    if found:
        shown = tensors_of(found[0], tensors, name).values()
        return f"{', '.join(shown)} are those of {' or '.join(kind.name for kind in found)}"
    if name in tensors:
        return f"{name} is {tensors[name].dtype} without scales, so plain"
    beside = sorted(n for n in tensors if n.startswith(name.removesuffix("weight")))[:4]
    if not beside:
        return f"{name} is missing"
    return f"{', '.join(beside)} are of no known kind: codes or scales are missing, or of a type " \
        "that no kind has"


def read_codes(
    tensors: Mapping[str, Array], names: Sequence[str], kind: Kind, said: Declared, *,
    split: bool, count: int, orientation: Orientation,
) -> Coded:
    """The matrix whose experts are called `names` (one, of the stack, unless `split`)."""
    per_name = [_complete(tensors, name, kind) for name in names]
    first = per_name[0]
    for name, there in zip(names, per_name, strict=True):
        odd = sorted((there.keys() ^ first.keys()) - set(kind.beside))
        if odd:
            lacks = name if odd[0] in first else names[0]
            raise CheckpointError(
                f"{name_of(lacks, odd[0])} is missing; other experts have theirs"
            )
    held = [{suffix: tensors[full] for suffix, full in there.items()} for there in per_name]

    def part(suffix: str) -> Matrix:
        found = [_at_least_1d(one[suffix]) for one in held]
        return found if split else found[0]

    shape = held[0][kind.codes].shape
    is_stream = kind.scheme == Scheme.CODEBOOK4
    one = shape[1:] if not split and not is_stream else shape
    if not split and not is_stream and shape[0] != count:
        raise CheckpointError(
            f"{per_name[0][kind.codes]} has {shape[0]} experts; {count} are expected"
        )
    extents = kind.extents(held[0], one)
    optional = {f: suffix for f, suffix in kind.optional.items() if suffix in first}
    fields = {f: part(suffix) for f, suffix in (*kind.fields.items(), *optional.items())}
    turned = orientation if kind.orientation is None else kind.orientation
    quant = Quant(flags=kind.flags)
    if is_stream:
        _stream(fields, held, names, extents, split, count, turned, quant)
    elif fields:  # GGUF's codes have their scales with them
        _blocks(fields, kind, extents, turned, said, quant, names[0], split)
    for name, value in fields.items():
        setattr(quant, name, value)
    suffixes = dict.fromkeys(suffix for there in per_name for suffix in there)
    by_suffix = {suffix: [there[suffix] for there in per_name if suffix in there]
                 for suffix in suffixes}
    return Coded(kind, part(kind.codes), quant, extents, turned, by_suffix)


def _complete(tensors: Mapping[str, Array], name: str, kind: Kind) -> dict[str, str]:
    """suffix -> tensor name; CheckpointError names one that is missing or of another type."""
    there = tensors_of(kind, tensors, name)
    for suffix in (kind.codes, *kind.fields.values()):
        if suffix not in there:
            raise CheckpointError(f"{name_of(name, suffix)} is missing")
    if kind.scheme == Scheme.CODEBOOK4:
        if not set(kind.beside) & there.keys():
            raise CheckpointError(f"{name}{kind.beside[0]} is missing")
        nested = set(kind.optional.values())
        absent = nested - there.keys()
        if absent and (len(absent) < len(nested) or dtype_of(tensors[there[".absmax"]])
                       == DType.U8):
            raise CheckpointError(f"{name_of(name, sorted(absent)[0])} is missing")
    checked = [(kind.codes, kind.types), (kind.fields.get("scales", ""), kind.scale_types)]
    for suffix, types in checked[: 1 + bool(kind.fields)]:
        if dtype_of(tensors[there[suffix]]) not in types:
            wanted = " or ".join(item.name.lower() for item in types)
            raise CheckpointError(
                f"{there[suffix]} is {tensors[there[suffix]].dtype}; {wanted} is right for "
                f"{kind.name}"
            )
    return there


def ignored_of(names: Sequence[str]) -> set[str]:
    """Names of the tensors beside matrices that nobody reads."""
    return {full for name in names for suffix in ACTIVATIONS
            if (full := name_of(name, suffix)) is not None}


def _at_least_1d(array: Array) -> Array:
    return array if array.shape else array.reshape(1)


def _values(array: Array) -> np.ndarray[Any, Any]:
    """On the host, as NumPy; of torch a copy: FSDP resizes, and NumPy forbids that."""
    return np.asarray(array.detach().cpu().clone() if hasattr(array, "cpu") else array)


def _same(arrays: Sequence[Array], what: str, names: Sequence[str]) -> Array:
    """The one table that all experts share."""
    first = _values(arrays[0])
    for name, array in zip(names, arrays, strict=True):
        if not np.array_equal(_values(array), first):
            raise CheckpointError(
                f"{name}{what} differs from that of {names[0]}; moec reads one for all experts"
            )
    return arrays[0]


def _stream(
    fields: dict[str, Any], held: Sequence[Mapping[str, Array]], names: Sequence[str],
    extents: Extents, split: bool, count: int, orientation: Orientation, quant: Quant,
) -> None:
    """bitsandbytes: blocks of the stream, one codebook, the offset of nested scales."""
    states = [state_of(one) for one in held]
    block = int(states[0]["blocksize"])
    for name, state in zip(names, states, strict=True):
        shape = [int(extent) for extent in state["shape"]]
        wanted = [*extents] if split else [count, *extents]
        if shape != wanted or int(state["blocksize"]) != block:
            raise CheckpointError(
                f"{name}: quant_state has the shape {shape} and blocks of {state['blocksize']}; "
                f"{wanted} and {block} are expected"
            )
    if orientation == Orientation.IN_OUT:
        quant.block_n = block
    else:
        quant.block_k = block
    for field, what in (("codebook", ".quant_map"), ("scale_book", ".nested_quant_map")):
        if field in fields:
            fields[field] = _same([one[what] for one in held], what, names)
    if "scale_book" in fields:
        offsets = [_number(state["nested_offset"], held[0][".absmax"]) for state in states]
        quant.scale_offset = offsets if split else offsets[0]
        quant.scale_block = int(states[0].get("nested_blocksize", 256))


def _number(value: float, like: Array) -> Array:
    """[1] f32 beside an array."""
    if hasattr(like, "new_tensor"):  # torch
        import torch  # type: ignore[import-not-found, unused-ignore]

        return like.new_tensor([float(value)], dtype=torch.float32)
    return np.array([value], np.float32)


def _blocks(
    fields: dict[str, Any], kind: Kind, extents: Extents, orientation: Orientation,
    said: Declared, quant: Quant, name: str, split: bool,
) -> None:
    """block_n and block_k, from the scales' shape and what the config says."""
    scales = fields["scales"][0] if split else fields["scales"]
    counts = tuple(scales.shape if split else scales.shape[1:])
    if len(counts) < 2:  # [1], or one a stack
        counts = (1, 1) if len(counts) == 0 or counts[0] == 1 else (counts[0], 1)
    if counts == (1, 1):  # one a matrix, whatever its shape
        shape = (1, 1) if split else (scales.shape[0], 1, 1)
        fields["scales"] = ([one.reshape(shape) for one in fields["scales"]] if split
                            else scales.reshape(shape))
    if kind.block is not None:
        sizes = kind.block
    else:
        wanted: tuple[int | None, int | None] = said.block or (None, said.group)
        if orientation == Orientation.IN_OUT and said.block is None:
            wanted = (said.group, None)
        sizes = (_size(extents[0], counts[0], wanted[0], name, kind),
                 _size(extents[1], counts[1], wanted[1], name, kind))
    if orientation == Orientation.IN_OUT:
        sizes = (sizes[1], sizes[0])
    quant.block_n, quant.block_k = sizes
    if "group_index" in fields and not _is_shuffled(fields["group_index"], quant.block_k, split):
        del fields["group_index"]
    scales2 = fields.get("scales2")
    if scales2 is not None and not split and len(scales2.shape) == 2 and scales2.shape[1] == 1:
        fields["scales2"] = scales2.reshape(-1)


def _size(extent: int, count: int, declared: int | None, name: str, kind: Kind) -> int:
    """Values that share a scale, of which there are `count` along an extent."""
    if count == extent and not (declared and declared > 1 and extent > 1):
        return 1
    if count == 1:
        return extent
    spare = kind.scheme == Scheme.FP8 and count == 2
    choices = [declared] if declared else [1 << bit for bit in range(4, 16)]
    for size in choices:
        if -(-extent // size) == count:
            return size
        if spare and size >= extent:
            return extent
    of = f"blocks of {declared}" if declared else "blocks of a power of two"
    raise CheckpointError(f"{name}: {count} scales along {extent} values do not fit {of}")


def _is_shuffled(index: Matrix, block: int, split: bool) -> bool:
    """Whether any input is of another group than that of its place (act-order)."""
    rows = [_values(one) for one in index] if split else list(_values(index))
    return any(not np.array_equal(row, np.arange(len(row)) // block) for row in rows)

