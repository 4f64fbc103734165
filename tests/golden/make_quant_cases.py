#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes quant_cases.json: each layer of quant/ as the descriptors and arrays of moec.h, the table
that the tests of Rust, Go, Julia and C walk. What a file is follows from the names of its tensors.
Its `adapters` are layers with LoRA, each with its runs: adapters and the prefix of the references.

A tensor is named as in the file; `{e}` in a name stands for 0 to E - 1 and makes a list of one
tensor an expert; `NAME#KEY` is the number of that key in the JSON text of a tensor, as f32 [1].
"""

import json
import struct
from pathlib import Path

HERE = Path(__file__).parent
TARGET = HERE / "quant_cases.json"
TOLERANCE = 1e-5
PLAIN, INT8, FP8, CODEBOOK4, MXFP4, NVFP4, INT4, AWQ, GPTQ, GPTQ_V2 = range(10)  # moec_scheme
SPLIT, GATE_THEN_UP, INTERLEAVED = 0, 1, 3  # moec_gate_layout
IN_OUT = 1
GPTOSS = 1  # moec_activation_kind
F32 = 0x12002
ADAPTERS = ("adapters/bf16_two_adapters", "quant/bnb_nf4_stack_nested")


def header(path):
    with path.open("rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        return json.loads(file.read(size))


def stream(tensors, codes, state):
    """bitsandbytes: codes and their statistics `state` + name."""
    kind = next(n for n in tensors if n.startswith(state.format(e=0) + "quant_state"))
    quant = {"scales": state + "absmax", "codebook": state.format(e=0) + "quant_map", "block": 64}
    if state.format(e=0) + "nested_absmax" in tensors:
        kind = kind.replace(state.format(e=0), state)
        quant |= {"scales2": state + "nested_absmax", "scale_offset": f"{kind}#nested_offset",
                  "scale_book": state.format(e=0) + "nested_quant_map"}
    return CODEBOOK4, {"data": codes, "quant": quant}


def columns(tensors, prefix, metadata):
    """AWQ and GPTQ."""
    gptq = prefix.format(e=0) + "g_idx" in tensors
    quant = {"scales": prefix + "scales", "zeros": prefix + "qzeros", "block_k": 32}
    quant |= {"group_index": prefix + "g_idx"} if gptq else {}
    later = metadata.get("checkpoint_format") == "gptq_v2"
    scheme = (GPTQ_V2 if later else GPTQ) if gptq else AWQ
    return scheme, {"data": prefix + "qweight", "quant": quant}


def rows(tensors, prefix):
    """compressed-tensors, modelopt, FP8 in blocks."""
    has = {n.removeprefix(prefix.format(e=0)) for n in tensors if n.startswith(prefix.format(e=0))}
    packed = "weight_packed" in has
    matrix = {"data": prefix + ("weight_packed" if packed else "weight")}
    if "weight_scale_inv" in has:
        blocks = {"block_n": 128, "block_k": 128}
        return FP8, matrix | {"quant": {"scales": prefix + "weight_scale_inv"} | blocks}
    quant = {"scales": prefix + "weight_scale"}
    if "weight_global_scale" in has:
        return NVFP4, matrix | {"quant": quant | {"scales2": prefix + "weight_global_scale",
                                                  "flags": 1}}
    if "weight_scale_2" in has:
        return NVFP4, matrix | {"quant": quant | {"scales2": prefix + "weight_scale_2"}}
    if not packed:
        return INT8, matrix | {"quant": quant}
    if "weight_zero_point" in has:
        quant["zeros"] = prefix + "weight_zero_point"
    return INT4, matrix | {"quant": quant | {"block_k": 32}}


def matrix_of(tensors, metadata, name):
    """(scheme, is it IN_OUT, the matrix)."""
    stacked, own = f"ckpt.experts.{name}", f"ckpt.experts.{{e}}.{name}."
    if f"{stacked}_blocks" in tensors:
        quant = {"scales": f"{stacked}_scales"}
        return MXFP4, False, {"data": f"{stacked}_blocks", "quant": quant}
    if stacked in tensors and tensors[stacked]["dtype"] == "BF16":
        return PLAIN, False, {"data": stacked}
    if stacked in tensors:
        return CODEBOOK4, metadata["stack_orientation"] == "in_out", stream(
            tensors, stacked, stacked + ".")[1]
    if own.format(e=0) + "qweight" in tensors:
        scheme, matrix = columns(tensors, own, metadata)
        return scheme, True, matrix
    if own.format(e=0) + "weight.absmax" in tensors:
        return CODEBOOK4, False, stream(tensors, own + "weight", own + "weight.")[1]
    scheme, matrix = rows(tensors, own)
    return scheme, False, matrix


def case(path):
    tensors = header(path)
    metadata = tensors.pop("__metadata__")
    stack_in_out = metadata["stack_orientation"] == "in_out"
    experts, first, second = json.loads(metadata["shape_down_proj"])
    inter, hidden = (first, second) if stack_in_out else (second, first)
    stacked = any(n.startswith("ckpt.experts.gate_up_proj") for n in tensors)
    scheme, in_out, down = matrix_of(tensors, metadata, "down_proj")
    names = ["gate_up", "down"] if stacked else ["gate", "up", "down"]
    matrices = {}
    for name in names:
        matrices[name] = matrix_of(tensors, metadata, f"{name}_proj")[2]
        block = matrices[name].get("quant", {}).pop("block", None)
        if block:
            matrices[name]["quant"]["block_n" if in_out else "block_k"] = block
        bias = f"ckpt.experts.{name}_proj_bias"
        if bias in tensors:
            matrices[name]["bias"] = bias
    layout = SPLIT
    if stacked:
        layout = INTERLEAVED if metadata["gate_layout"] == "interleaved" else GATE_THEN_UP
    shape = {"num_experts": experts, "hidden": hidden, "inter": inter, "gate_layout": layout,
             "dtype": F32}
    return {
        "file": path.stem,
        "experts": shape | {"top_k": tensors["ids"]["shape"][1], "save": 3} |
        ({"activation": {"kind": GPTOSS}} if metadata["activation"] == "gptoss" else {}),
        "weights": shape | {"gate_up_scheme": scheme, "down_scheme": scheme} |
        ({"gate_up_orientation": IN_OUT, "down_orientation": IN_OUT} if in_out else {}),
        "matrices": matrices,
        # dequant.down_proj.* index a stack of the other orientation
        "turned": in_out != stack_in_out,
    }


def with_adapters(name):
    path = HERE / f"{name}.safetensors"
    metadata = header(path)["__metadata__"]
    scales, runs = json.loads(metadata["lora_scale"]), json.loads(metadata["lora_active"])
    one = case(path) | {"file": name, "runs": [
        {"reference": reference,
         "adapters": [{"name": a, "scale": scales[f"{a}.down_proj"]} for a in active]}
        for reference, active in runs.items()]}
    one.pop("turned")
    return one


def table():
    cases = [case(path) for path in sorted((HERE / "quant").glob("*.safetensors"))]
    quantised, adapters = (",\n    ".join(json.dumps(one) for one in some)
                           for some in (cases, map(with_adapters, ADAPTERS)))
    return (f'{{\n  "tolerance": {TOLERANCE},\n  "cases": [\n    {quantised}\n  ],\n'
            f'  "adapters": [\n    {adapters}\n  ]\n}}\n')


if __name__ == "__main__":
    TARGET.write_text(table())
