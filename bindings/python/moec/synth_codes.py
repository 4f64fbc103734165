# SPDX-License-Identifier: Apache-2.0
"""Random matrices of codes as each library publishes them: the schemes of `moec synth --scheme`.

Codes are random bits, or normal where they are numbers; scales bring the values to the standard
deviation of plain ones, fan_in^-0.5. Each tensor is a Fill: a table of 65536 values from which
random 16-bit numbers choose, or an array.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import ml_dtypes
import numpy as np

from ._context import Context
from ._enums import Orientation
from ._quantise import quantise
from .family import Family, Layout
from .kinds import name_of

E4M3, E8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.uint8)
F32, F16, U8, I8, I32 = (np.dtype(kind) for kind in (np.float32, np.float16, np.uint8, np.int8,
                                                     np.int32))


@dataclass(frozen=True)
class Fill:
    """What a tensor is filled with."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    table: tuple[str, Any] = ("bits", 0)
    """("normal", std), ("scale", mean), ("levels", values) or ("bits", 0)"""
    given: np.ndarray[Any, Any] | None = None


@dataclass(frozen=True)
class Matrix:
    """One matrix, or a stack, to be made."""

    rows: int
    columns: int
    """N and K"""
    experts: int
    """of a stack; 0: one matrix"""
    orientation: Orientation
    """of a plain one"""
    dtype: np.dtype[Any]
    """of the model"""
    seed: int

    def stacked(self, *shape: int) -> tuple[int, ...]:
        return (self.experts, *shape) if self.experts else shape

    @property
    def deviation(self) -> float:
        return float(self.columns**-0.5)


Rule = Callable[[Matrix, dict[str, Any]], dict[str, Fill]]


@dataclass(frozen=True)
class Scheme:
    """A name of --scheme: the kind, how a matrix of it is made, and config.json's section."""

    kind: str
    rule: Rule
    section: dict[str, Any] | None
    options: dict[str, Any] = field(default_factory=dict)
    stacks: bool = False
    """it is published for stacked experts, too"""
    only_stacks: bool = False


def _scales(m: Matrix, count: tuple[int, ...], unit: float, dtype: Any = None) -> Fill:
    """Scales of codes whose standard deviation is `unit`."""
    kind = m.dtype if dtype is None else np.dtype(dtype)
    return Fill(kind, m.stacked(*count), ("scale", m.deviation / unit))


def _exponents(m: Matrix, count: tuple[int, ...], unit: float) -> Fill:
    middle = 127 + round(math.log2(m.deviation / unit))
    return Fill(E8M0, m.stacked(*count), ("levels", (middle - 1, middle, middle, middle + 1)))


def _stream(m: Matrix, options: dict[str, Any]) -> dict[str, Fill]:
    """bitsandbytes: one stream; its tables are those that moec_quantise writes."""
    turned = m.orientation == Orientation.IN_OUT
    shape = m.stacked(*((m.columns, m.rows) if turned else (m.rows, m.columns)))
    count, name = math.prod(shape), options["codebook"]
    blocks, nested = -(-count // 64), options.get("nested", False)
    with Context() as context:
        ones = context.asarray(np.ones((1, 1, 64), np.float32))
        book = quantise(context, ones, name, nested=True).quant
        codebook, scale_book = np.array(book.codebook), np.array(book.scale_book)
    scale = m.deviation / 0.55
    state = {"quant_type": name, "blocksize": 64, "dtype": m.dtype.name, "shape": list(shape)}
    made = {"": Fill(U8, (-(-count // 2), 1)), ".quant_map": Fill(F32, (16,), given=codebook)}
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": scale}
        made |= {".absmax": Fill(U8, (blocks,)),
                 ".nested_absmax": Fill(F32, (-(-blocks // 256),), ("scale", scale / 4)),
                 ".nested_quant_map": Fill(F32, (256,), given=scale_book)}
    else:
        made[".absmax"] = Fill(F32, (blocks,), ("scale", scale))
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return made | {f".quant_state.bitsandbytes__{name}": Fill(U8, text.shape, given=text)}


def _mxfp4(m: Matrix, options: dict[str, Any]) -> dict[str, Fill]:
    blocks = _whole(m.columns, 32, "MXFP4")
    shape = (blocks, 16) if options["codes"] == "_blocks" else (blocks * 16,)
    return {options["codes"]: Fill(U8, m.stacked(m.rows, *shape)),
            options["scales"]: _exponents(m, (m.rows, blocks), 2.9)}


def _nvfp4(m: Matrix, options: dict[str, Any]) -> dict[str, Fill]:
    blocks, divides = _whole(m.columns, 16, "NVFP4"), options["codes"] == "_packed"
    scale = m.deviation / (64 * 2.9)
    one = np.full(m.stacked(1) if divides else (), 1 / scale if divides else scale, np.float32)
    if m.experts and divides:
        one = one.reshape(-1)
    return {options["codes"]: Fill(U8, m.stacked(m.rows, blocks * 8)),
            "_scale": Fill(E4M3, m.stacked(m.rows, blocks), ("scale", 64.0)),
            options["scales2"]: Fill(F32, one.shape, given=one)}


def _fp8(m: Matrix, options: dict[str, Any]) -> dict[str, Fill]:
    bn, bk = options.get("block", (1, 0))
    counts = -(-m.rows // (bn or m.rows)), -(-m.columns // (bk or m.columns))
    made = {"": Fill(E4M3, m.stacked(m.rows, m.columns), ("normal", 100.0))}
    if options.get("mx"):
        return made | {"_scale": _exponents(m, counts, 100.0)}
    if bk:
        return made | {"_scale_inv": _scales(m, counts, 100.0, F32)}
    return made | {"_scale": _scales(m, counts if bn else (1,), 100.0)}


def _int8(m: Matrix, options: dict[str, Any]) -> dict[str, Fill]:
    made = {"": Fill(I8, m.stacked(m.rows, m.columns), ("normal", 30.0)),
            "_scale": _scales(m, (m.rows, 1), 30.0)}
    if options.get("zeros"):
        made["_zero_point"] = Fill(I8, m.stacked(m.rows, 1), ("levels", (-3, -1, 0, 2)))
    return made


def _int4(m: Matrix, options: dict[str, Any]) -> dict[str, Fill]:
    groups = -(-m.columns // 32)
    shape = np.array([m.rows, m.columns], np.int64)
    made = {"_packed": Fill(I32, m.stacked(m.rows, -(-m.columns // 8))),
            "_scale": _scales(m, (m.rows, groups), 4.6),
            "_shape": Fill(shape.dtype, (2,), given=shape)}
    if options.get("zeros"):
        made["_zero_point"] = _zeros((-(-m.rows // 8), groups), (7, 8, 9))
    if options.get("shuffled"):
        made["_g_idx"] = _shuffled(m, 32)
    return made


def _columns(m: Matrix, options: dict[str, Any]) -> dict[str, Fill]:
    """AWQ [K,N/8] and GPTQ [K/8,N]."""
    size = 128 if m.columns % 128 == 0 else 32
    groups, words = -(-m.columns // size), _whole(m.rows, 8, "AWQ and GPTQ")
    awq = options["kind"] == "awq"
    shape = (m.columns, words) if awq else (_whole(m.columns, 8, "GPTQ"), m.rows)
    made = {"qweight": Fill(I32, shape),
            "qzeros": _zeros((groups, words), options["zeros"]),
            "scales": _scales(m, (groups, m.rows), 4.6, F16)}
    if not awq:
        plain = (np.arange(m.columns) // size).astype(np.int32)
        made["g_idx"] = _shuffled(m, size) if options.get("shuffled") else Fill(
            I32, plain.shape, given=plain)
    return made


def _whole(extent: int, unit: int, what: str) -> int:
    if extent % unit:
        raise ValueError(f"{what} needs multiples of {unit}; {extent} is none")
    return extent // unit


def _zeros(shape: tuple[int, ...], codes: tuple[int, ...]) -> Fill:
    """Eight zero points a word."""
    pairs = tuple(high << 4 | low for high in codes for low in codes)
    return Fill(I32, shape, ("levels", pairs))


def _shuffled(m: Matrix, size: int) -> Fill:
    groups = (np.arange(m.columns) // size).astype(np.int32)
    np.random.default_rng(m.seed).shuffle(groups)
    return Fill(I32, groups.shape, given=groups)


def _gguf(m: Matrix, options: dict[str, Any]) -> dict[str, Fill]:
    """Blocks of random bits, in which the fields of scales are set (_set_scales)."""
    size, values = options["size"], options["values"]
    units = _whole(m.columns, values, options["kind"])
    return {"": Fill(U8, m.stacked(m.rows, units * size), ("gguf", options["kind"]))}


def set_gguf_scales(kind: str, codes: np.ndarray[Any, Any], deviation: float) -> None:
    """The scales of blocks of random bits: d, dmin and exponents of values around 0."""
    size, values = _GGUF[kind]
    blocks = codes.reshape(-1, size)

    def put(at: int, value: float) -> None:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)

    if kind == "gguf-mxfp4":
        blocks[:, 0] = 127 + round(math.log2(deviation / 2.9))
    elif kind == "gguf-q4_k":
        put(0, deviation / 257)
        put(2, deviation * 7.5 / 257)
    elif kind == "gguf-q6_k":
        put(size - 2, deviation / (73 * 18.5))
    else:
        put(0, deviation / (73 if kind == "gguf-q8_0" else 4.6))


_GGUF = {"gguf-q8_0": (34, 32), "gguf-q4_0": (18, 32), "gguf-q4_k": (144, 256),
         "gguf-q6_k": (210, 256), "gguf-mxfp4": (17, 32)}


def _ct(form: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["re:.*gate$"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


def _bnb(name: str, nested: bool = False) -> Scheme:
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": name,
               "bnb_4bit_use_double_quant": nested}
    return Scheme("bnb", _stream, section, {"codebook": name, "nested": nested}, stacks=True)


def _gptq(version: str, kind: str, zeros: tuple[int, ...], shuffled: bool = False) -> Scheme:
    section = {"quant_method": "gptq", "bits": 4, "desc_act": shuffled, "sym": False,
               "checkpoint_format": version}
    return Scheme(kind, _columns, section, {"zeros": zeros, "shuffled": shuffled})


_F8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_G32 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
SCHEMES: dict[str, Scheme] = {
    "nf4": _bnb("nf4"), "nf4-nested": _bnb("nf4", True), "fp4": _bnb("fp4"),
    "fp4-nested": _bnb("fp4", True),
    "mxfp4": Scheme("mxfp4", _mxfp4, {"quant_method": "mxfp4"},
                    {"codes": "_blocks", "scales": "_scales"}, stacks=True, only_stacks=True),
    "mxfp4-packed": Scheme("mxfp4-packed", _mxfp4, _ct("mxfp4-pack-quantized", num_bits=4),
                           {"codes": "_packed", "scales": "_scale"}),
    "nvfp4": Scheme("nvfp4", _nvfp4, _ct("nvfp4-pack-quantized", num_bits=4, group_size=16),
                    {"codes": "_packed", "scales2": "_global_scale"}),
    "nvfp4-modelopt": Scheme("nvfp4-modelopt", _nvfp4,
                             {"quant_method": "modelopt", "quant_algo": "NVFP4"},
                             {"codes": "", "scales2": "_scale_2"}),
    "fp8-block": Scheme("fp8-block", _fp8, _F8 | {"weight_block_size": [128, 128]},
                        {"block": (128, 128)}),
    "fp8-channel": Scheme("fp8", _fp8, _ct("float-quantized", num_bits=8, type="float",
                                           strategy="channel")),
    "fp8-tensor": Scheme("fp8", _fp8, _ct("float-quantized", num_bits=8, type="float",
                                          strategy="tensor"), {"block": (0, 0)}),
    "mxfp8": Scheme("fp8", _fp8, _ct("mxfp8-quantized", num_bits=8, type="float",
                                     strategy="group", group_size=32),
                    {"block": (1, 32), "mx": True}),
    "int8": Scheme("int8", _int8, _ct("int-quantized", num_bits=8, strategy="channel")),
    "int8-asym": Scheme("int8", _int8, _ct("int-quantized", num_bits=8, symmetric=False),
                        {"zeros": True}),
    "int4": Scheme("int4", _int4, _ct("pack-quantized", **_G32)),
    "int4-asym": Scheme("int4", _int4, _ct("pack-quantized", **_G32, symmetric=False),
                        {"zeros": True}),
    "int4-actorder": Scheme("int4", _int4, _ct("pack-quantized", **_G32, actorder="group"),
                            {"shuffled": True}),
    "awq": Scheme("awq", _columns, {"quant_method": "awq", "bits": 4, "version": "gemm",
                                    "zero_point": True}, {"zeros": (7, 8, 9)}),
    "gptq": _gptq("gptq", "gptq", (6, 7, 8)),
    "gptq-v2": _gptq("gptq_v2", "gptq-v2", (7, 8, 9)),
    "gptq-actorder": _gptq("gptq", "gptq", (6, 7, 8), True),
} | {kind: Scheme(kind, _gguf, None, {"size": size, "values": values})
     for kind, (size, values) in _GGUF.items()}


def tensors(scheme: Scheme, name: str, matrix: Matrix) -> Iterator[tuple[str, Fill]]:
    """The tensors of one matrix, or of a stack, by their full names."""
    for suffix, fill in scheme.rule(matrix, scheme.options | {"kind": scheme.kind}).items():
        full = name_of(name, suffix)
        if full is None:
            raise ValueError(f"{scheme.kind} has no name for {name}, which is stacked")
        yield full, fill


def find(name: str) -> Scheme:
    """A scheme by its name. ValueError suggests the nearest."""
    if name not in SCHEMES:
        close = get_close_matches(name, SCHEMES, 1, 0.5)
        hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(SCHEMES)}"
        raise ValueError(f"no scheme {name!r}; {hint}")
    return SCHEMES[name]


def layout_of(scheme: Scheme | None, family: Family) -> Layout:
    """The layout in which a family's experts are published so."""
    if scheme is None or scheme.section is None:
        return family.layouts[0]
    for layout in family.layouts:
        split = all("{e}" in name for name in layout.names.values())
        if (split and not scheme.only_stacks) or (not split and scheme.stacks):
            return layout
    needed = "stacks" if scheme.only_stacks else "one matrix an expert"
    raise ValueError(
        f"experts of {family.model_types[0]} are not published as {scheme.kind}, which needs "
        f"{needed}"
    )
