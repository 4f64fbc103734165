# SPDX-License-Identifier: Apache-2.0
"""Python: the arrays that each call reads and writes, with what they are; what SWIG is told about
all structs, handles and functions; the enums; and the tables of moec.jax."""

import re
import textwrap

from emit_python_enums import enums_module
from fields import MATRIX, gradients, pointee, struct, tensors

NAME = "Generated from moec.h by generate.py; do not edit."
FIELDS_HEAD = f'''# SPDX-License-Identifier: Apache-2.0
# {NAME}
"""The arrays of each call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from ._adapters import Adapter
from ._tensors import Array
from ._weights import WeightSet
'''
JAX_HEAD = f"""// SPDX-License-Identifier: Apache-2.0
// {NAME}
// Where each named array of the Python side goes in the structs of moec.h.
#pragma once

#include "field.h"

namespace moec::xla {{
"""
# Keyword arguments of the methods, and what these have in parameters of their own.
INPUTS = {
    "GateInputs": ("moec_gate_args", {"x", "weight"}),
    "RouteInputs": ("moec_route_args", {"logits"}),
    "ExpertsInputs": ("moec_experts_args", {"x"}),
    "LayerInputs": ("moec_layer_args", {"x", "gate_weight"}),
}
GRADIENTS = {
    "ExpertsGradients": ("moec_experts_grad_args", "Gradients of Experts.forward"),
    "LayerGradients": ("moec_layer_grad_args", "Gradients of Layer.forward"),
}
NO_CONSTRUCTOR = {"moec_allocator", "moec_thread_pool"}  # moec.i leaves them out
# Of functions without a stream, those that may wait, or free what is waited for.
WAITS = re.compile(
    r"_(abort|alloc|count|create|free|load|poll|sync|trim|backend_describe|device_query)$")


def wrapped(text, indent, limit=100):
    lead = " " * indent
    return textwrap.wrap(text, limit, initial_indent=lead, subsequent_indent=lead,
                         break_long_words=False, break_on_hyphens=False)


def names_table(title, kind, rows):
    out = [f"{title}: {kind} = {{"]
    for name, names in rows:
        listed = ", ".join(f'"{n}"' for n in names) + ("," if len(names) == 1 else "")
        out += [f'    "{name}": (', *wrapped(listed, 8), "    ),"]
    return out + ["}"]


def annotated(names_and_fields, kind_of, value=""):
    out = []
    for name, field in names_and_fields:
        out.append(f"    {name}: {kind_of(field)} | None{value}")
        if "doc" in field:
            out += wrapped(f'"""{field["doc"]}"""', 4)
    return out


def inputs_class(api, name, raw, own):
    row = struct(api, raw)
    given = [(f["name"], f) for f in row["fields"]
             if f["name"] in tensors(row, "in") and f["name"] not in own]
    return ["", "", f"class {name}(TypedDict, total=False):", f'    """Arrays of {raw}."""', "",
            *annotated(given, lambda f: "Array")]


WRITTEN = {"moec_weight_set": "WeightSet", "moec_adapter": "list[Adapter]"}
"""records that a call points its gradients at"""


def kind_of_gradient(field):
    return WRITTEN.get(pointee(field, "record"), "Array")


def gradients_class(api, name, raw, text):
    row = struct(api, raw)
    given = [(f["name"].removeprefix("d_"), f) for f in row["fields"]
             if f["name"] in tensors(row, "out") or pointee(f, "record") in WRITTEN
             and f["name"].startswith("d_")]
    return ["", "", "@dataclass(kw_only=True, slots=True)", f"class {name}:",
            f'    """{text}; None = not asked for."""', "",
            *annotated(given, kind_of_gradient, " = None")]


def fields_module(api):
    args = [row for row in api["structs"] if tensors(row, "in")]
    backward = [row for row in args if "_grad_" in row["name"]]
    out = [FIELDS_HEAD]
    kind = "dict[str, tuple[str, ...]]"
    out += names_table("INPUTS", kind, [(row["name"], tensors(row, "in")) for row in args])
    out += ['"""struct -> the arrays that its call reads"""', ""]
    out += names_table("GRADIENTS", kind, [(row["name"], gradients(row)) for row in backward])
    out.append('"""struct -> the arrays whose gradients its call writes, into d_..."""')
    for name, (raw, own) in INPUTS.items():
        out += inputs_class(api, name, raw, own)
    for name, (raw, text) in GRADIENTS.items():
        out += gradients_class(api, name, raw, text)
    return "\n".join(out + [""])


def swig_lists(api):
    sized = [row["name"] for row in api["structs"]
             if row["sized"] and row["name"] not in NO_CONSTRUCTOR]
    waiting = [row["name"] for row in api["functions"]
               if WAITS.search(row["name"]) or any(a["name"] == "stream" for a in row["arguments"])]
    return "\n".join([
        "// SPDX-License-Identifier: Apache-2.0", f"// {NAME}",
        *(f"RETURNED_HANDLE({name})" for name in api["handles"]),
        *(f"SIZED({name})" for name in sized), *(f"%thread {name};" for name in waiting), "",
    ])


def field_table(name, row, names, prefix=""):
    out = [f"inline constexpr Field<{row['name']}> {name}[] = {{"]
    out += [f'    {{"{n}", &{row["name"]}::{prefix}{n}}},' for n in names]
    return out + ["};"]


def jax_tables(api):
    out = [JAX_HEAD]
    for name in ("Layer", "Experts"):
        forward = struct(api, f"moec_{name.lower()}_args")
        backward = struct(api, f"moec_{name.lower()}_grad_args")
        out += field_table(f"k{name}Inputs", forward, tensors(forward, "in"))
        out += field_table(f"k{name}Outputs", forward, tensors(forward, "out"))
        out += field_table(f"k{name}GradInputs", backward, tensors(backward, "in"))
        out += field_table(f"k{name}Gradients", backward, gradients(backward), "d_")
    out += ["", "inline constexpr MatrixField kMatrices[] = {"]
    taken = tensors(struct(api, "moec_layer_args"))  # gate_bias, by the router's
    matrices = [f for f in struct(api, "moec_weight_set")["fields"] if f["type"] == MATRIX]
    for part in tensors(struct(api, "moec_matrix")):
        for matrix in (f["name"] for f in matrices):
            name = matrix if part == "data" else f"{matrix}_{part}"
            routed = f"expert_{name}" if name in taken else name
            out.append(f'    {{"{name}", "{routed}", &moec_weight_set::{matrix}, '
                       f"&moec_matrix::{part}}},")
    return "\n".join(out + ["};", "", "}  // namespace moec::xla", ""])


def emit(api):
    return {
        "python/moec/_enums.py": enums_module(api, NAME),
        "python/moec/_fields.py": fields_module(api),
        "python/moec_lists.i": swig_lists(api),
        "python/jax/tables.h": jax_tables(api),
    }
