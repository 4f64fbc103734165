# SPDX-License-Identifier: Apache-2.0
"""How checkpoints store a matrix of codes: one row a kind, found by its tensors' names and types.

A suffix belongs to the name that a plain matrix would have ("experts.3.up_proj.weight",
"experts.gate_up_proj"). One that begins with "_" or "." is appended; another stands in the place of
"weight" at its end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._enums import DType, Orientation, QuantFlags, Scheme
from ._tensors import Array, dtype_of
from .checkpoint import CheckpointError

_REAL = (DType.F32, DType.F16, DType.BF16)
_E8M0 = (DType.U8, DType.F8_E8M0)
_F8 = (DType.F8_E4M3, DType.F8_E5M2)
_I32 = (DType.I32,)
_I8 = (DType.I8,)
_U8 = (DType.U8,)
_STATE = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")

Extents = tuple[int, int]
"""rows and columns of a matrix as it is stored"""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way in which libraries store codes."""

    name: str
    scheme: Scheme
    codes: str
    """suffix of the codes"""
    types: tuple[DType, ...]
    """of the codes"""
    scale_types: tuple[DType, ...]
    fields: Mapping[str, str]
    """field of Quant -> suffix: tensors that are always there; scales first"""
    optional: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    """suffixes of what is read for sizes alone"""
    extents: Callable[[Mapping[str, Array], Sequence[int]], Extents]
    """of the tensors of one matrix by suffix, and the shape of its codes"""
    orientation: Orientation | None = Orientation.OUT_IN
    """None: that of a plain matrix of this name"""
    flags: QuantFlags = QuantFlags.NONE
    block: Extents | None = None
    """that every matrix of this kind has; else it follows from the scales' shape"""


def _plain(_: Mapping[str, Array], shape: Sequence[int]) -> Extents:
    return shape[0], shape[1]


def _nibbles(_: Mapping[str, Array], shape: Sequence[int]) -> Extents:
    return shape[0], 2 * math.prod(shape[1:])


def _words(tensors: Mapping[str, Array], shape: Sequence[int]) -> Extents:
    """Eight codes in a word; the last word of a row may be part empty."""
    if "_shape" in tensors:
        rows, columns = (int(extent) for extent in tensors["_shape"].reshape(-1)[-2:])
        return rows, columns
    return shape[0], 8 * shape[1]


def _word_columns(_: Mapping[str, Array], shape: Sequence[int]) -> Extents:
    return shape[0], 8 * shape[1]


def _word_rows(tensors: Mapping[str, Array], shape: Sequence[int]) -> Extents:
    rows = tensors["g_idx"].shape[-1] if "g_idx" in tensors else 8 * shape[0]
    return rows, shape[1]


def _state(tensors: Mapping[str, Array], _: Sequence[int]) -> Extents:
    rows, columns = state_of(tensors)["shape"][-2:]
    return rows, columns


def state_of(tensors: Mapping[str, Array]) -> dict[str, Any]:
    """What bitsandbytes writes beside its codes as JSON."""
    text = next(tensors[suffix] for suffix in _STATE if suffix in tensors)
    try:
        state = json.loads(bytes(text.reshape(-1).tolist()))
        _, _ = int(state["blocksize"]), state["shape"][-2:]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"quant_state is not bitsandbytes' JSON: {error!r}") from None
    found: dict[str, Any] = state
    return found


def _gguf(name: str, scheme: Scheme, size: int, values: int = 32) -> Kind:
    """Blocks of `values` in `size` bytes. The file says of which type a tensor is."""
    def extents(_: Mapping[str, Array], shape: Sequence[int]) -> Extents:
        return shape[0], shape[1] // size * values

    return Kind(name=f"gguf-{name}", scheme=scheme, codes="", types=_U8, scale_types=(), fields={},
                extents=extents)


_QWEIGHT = {"scales": "scales", "zeros": "qzeros"}
_GPTQ: dict[str, Any] = {
    "codes": "qweight", "types": _I32, "scale_types": _REAL, "fields": _QWEIGHT,
    "optional": {"group_index": "g_idx"}, "extents": _word_rows,
    "orientation": Orientation.IN_OUT,
}
_PACKED: dict[str, Any] = {"codes": "_packed", "types": _U8, "extents": _nibbles}

KINDS: tuple[Kind, ...] = (
    Kind(name="bnb", scheme=Scheme.CODEBOOK4, codes="",
         types=(*_U8, *_I8, *_REAL), scale_types=(DType.F32, *_U8),
         fields={"scales": ".absmax", "codebook": ".quant_map"},
         optional={"scale_book": ".nested_quant_map", "scales2": ".nested_absmax"},
         beside=_STATE, extents=_state, orientation=None),
    Kind(name="mxfp4", scheme=Scheme.MXFP4, codes="_blocks", types=_U8, scale_types=_E8M0,
         fields={"scales": "_scales"}, extents=_nibbles, block=(1, 32)),
    Kind(name="mxfp4-packed", scheme=Scheme.MXFP4, scale_types=_E8M0,
         fields={"scales": "_scale"}, block=(1, 32), **_PACKED),
    Kind(name="nvfp4", scheme=Scheme.NVFP4, scale_types=(DType.F8_E4M3,),
         fields={"scales": "_scale", "scales2": "_global_scale"},
         flags=QuantFlags.SCALES2_DIVIDES, block=(1, 16), **_PACKED),
    Kind(name="nvfp4-modelopt", scheme=Scheme.NVFP4, codes="", types=_U8,
         scale_types=(DType.F8_E4M3,), fields={"scales": "_scale", "scales2": "_scale_2"},
         extents=_nibbles, block=(1, 16)),
    Kind(name="int4", scheme=Scheme.INT4, codes="_packed", types=_I32, scale_types=_REAL,
         fields={"scales": "_scale"}, optional={"zeros": "_zero_point", "group_index": "_g_idx"},
         beside=("_shape",), extents=_words),
    Kind(name="int8", scheme=Scheme.INT8, codes="", types=_I8, scale_types=_REAL,
         fields={"scales": "_scale"}, optional={"zeros": "_zero_point"}, extents=_plain,
         orientation=None),
    Kind(name="fp8-block", scheme=Scheme.FP8, codes="", types=_F8, scale_types=(*_REAL, *_E8M0),
         fields={"scales": "_scale_inv"}, extents=_plain, orientation=None),
    Kind(name="fp8", scheme=Scheme.FP8, codes="", types=_F8, scale_types=(*_REAL, *_E8M0),
         fields={"scales": "_scale"}, extents=_plain, orientation=None),
    Kind(name="awq", scheme=Scheme.AWQ, codes="qweight", types=_I32, scale_types=_REAL,
         fields=_QWEIGHT, extents=_word_columns, orientation=Orientation.IN_OUT),
    Kind(name="gptq", scheme=Scheme.GPTQ, **_GPTQ),
    Kind(name="gptq-v2", scheme=Scheme.GPTQ_V2, **_GPTQ),
)
GGUF_KINDS: tuple[Kind, ...] = (
    _gguf("q8_0", Scheme.GGUF_Q8_0, 34),
    _gguf("q4_0", Scheme.GGUF_Q4_0, 18),
    _gguf("q4_k", Scheme.GGUF_Q4_K, 144, 256),
    _gguf("q6_k", Scheme.GGUF_Q6_K, 210, 256),
    _gguf("mxfp4", Scheme.GGUF_MXFP4, 17),
)
BY_NAME = {kind.name: kind for kind in (*KINDS, *GGUF_KINDS)}
ACTIVATIONS = ("input_scale", "input_global_scale", "input_scale_ub", "activation_scale",
               "_input_scale", "_activation_scale")
"""scales of quantised activations: moec's are not quantised, and nobody reads them"""


def name_of(name: str, suffix: str) -> str | None:
    """The tensor that a suffix means, None where the name has no such."""
    if suffix[:1] in ("", "_", "."):
        return name + suffix
    stem = name.removesuffix("weight")
    return None if stem == name else stem + suffix


def tensors_of(kind: Kind, tensors: Mapping[str, Array], name: str) -> dict[str, str]:
    """suffix -> tensor name, of what is there of a matrix."""
    suffixes = (kind.codes, *kind.fields.values(), *kind.optional.values(), *kind.beside)
    named = {suffix: name_of(name, suffix) for suffix in suffixes}
    return {suffix: full for suffix, full in named.items() if full in tensors}  # type: ignore


def kinds_of(tensors: Mapping[str, Array], name: str) -> list[Kind]:
    """The kinds that the codes and scales of a matrix can be of: none of a plain one. GPTQ's two
    versions have the same tensors."""
    found = []
    for kind in KINDS:
        codes, scales = name_of(name, kind.codes), name_of(name, kind.fields["scales"])
        if codes is None or codes not in tensors or scales is None or scales not in tensors:
            continue
        if _is(tensors[codes], kind.types) and _is(tensors[scales], kind.scale_types):
            found.append(kind)
    if found and found[0].codes == "qweight":  # AWQ packs eight columns, GPTQ eight rows
        codes, scales = name_of(name, "qweight"), name_of(name, "scales")
        assert codes and scales
        packed = tensors[codes].shape[-1] != tensors[scales].shape[-1]
        found = [kind for kind in found if (kind.scheme == Scheme.AWQ) == packed]
    return found


def has_tensors(tensors: Mapping[str, Array], name: str) -> bool:
    """Whether there is a matrix of this name, plain or as codes of any kind."""
    return name in tensors or any(name_of(name, kind.codes) in tensors for kind in KINDS)


def _is(array: Array, types: tuple[DType, ...]) -> bool:
    try:
        return dtype_of(array.dtype) in types
    except TypeError:
        return False
