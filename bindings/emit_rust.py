# SPDX-License-Identifier: Apache-2.0
"""Rust: the `dynamic` half of moec-sys (bindgen's functions, looked up by dlopen at first use), and
the rows of the crate moec's macros: a builder for each call and each descriptor."""

import re
import textwrap

from fields import BUFFER, MATRIX, TENSOR, pointee, settings, struct, tensors

HEAD = """// SPDX-License-Identifier: Apache-2.0
// Generated from moec.h by generate.py; do not edit.
"""
NUMBERS = {"int": "i", "uint": "u", "float": "f"}
CALLS = {
    "RouteCall": ("moec_route_args", "Logits to expert ids and routing weights."),
    "ExpertsCall": ("moec_experts_args", "Experts on a plan: forward."),
    "ExpertsGradCall": (
        "moec_experts_grad_args",
        "Experts on a plan: gradients; every output that is not given is skipped.",
    ),
    "LayerCall": ("moec_layer_args", "The whole layer: forward."),
    "LayerGradCall": (
        "moec_layer_grad_args",
        "The whole layer: gradients; every output that is not given is skipped.",
    ),
}
DESCRIPTORS = {
    "ContextDesc": ("moec_context_desc", "A device and how the context uses it."),
    "RouterDesc": (
        "moec_router_desc",
        "What a router computes; constants are `moec_sys::MOEC_*`, zero fields are defaults.",
    ),
    "ExpertsDesc": ("moec_experts_desc", "What the experts compute."),
    "WeightsDesc": ("moec_weights_desc", "How expert matrices lie in memory."),
    "PlanDesc": ("moec_plan_desc", "Bounds and rules of a plan."),
    "AdaptersDesc": ("moec_adapters_desc", "Of what matrices a set of adapters may have terms."),
    "QuantiseDesc": ("moec_quantise_desc", "What codes are made, and of which weights."),
}
SETS = {
    "WeightSet": ("Tensor", "&'a [Tensor<'a>]", "The matrices of a set of experts."),
    "WeightSetMut": (
        "TensorMut",
        "&'a mut [TensorMut<'a>]",
        "The same of plain values, which adapters may be merged into.",
    ),
    "WeightGrads": (
        "TensorMut",
        "&'a mut [TensorMut<'a>]",
        "Where the gradients of a set of experts go; those that are not given are skipped.",
    ),
}
HANDLES = {"moec_plan": "Plan", "moec_weights": "Weights<'a>"}  # the others have no type here


def type_name(kind, path=""):
    if kind.get("name") == "size_t":
        return "usize"
    if kind["kind"] in NUMBERS:
        return f"{NUMBERS[kind['kind']]}{kind['bits']}"
    if kind["kind"] == "char":
        return "std::os::raw::c_char"
    if kind["kind"] == "void":
        return "std::os::raw::c_void"
    if kind["kind"] in ("record", "handle"):
        return path + kind["name"]
    if kind["kind"] == "function":
        return "moec_log_function"
    if kind["kind"] == "array":
        return f"*mut {type_name(kind['of'])}"
    return f"*{'const' if kind['const'] else 'mut'} {type_name(kind['to'])}"


def functions(api):
    out = [HEAD, "functions! {"]
    for row in api["functions"]:
        args = ", ".join(f"{a['name']}: {type_name(a['type'])}" for a in row["arguments"])
        returns = row["returns"]
        result = "" if returns["kind"] == "void" else f" -> {type_name(returns)}"
        out.append(f"    fn {row['name']}({args}){result};")
    return "\n".join(out + ["}", ""])


def doc(text, indent):
    """Lines of a documentation comment."""
    lead = " " * indent + "/// "
    return textwrap.wrap(text, 100, initial_indent=lead, subsequent_indent=lead,
                         break_long_words=False, break_on_hyphens=False)


def as_code(text):
    """A comment of moec.h as Markdown: its shapes and its names are code."""
    return re.sub(r"\[[\w+*,/. ]+\]|\bmoec_\w+", r"`\g<0>`", text).replace("<", r"\<")


def lines(row, fields, indent, declare=lambda f: f["name"]):
    """The fields with their comments, one below the other."""
    out = []
    for field in fields:
        says = f": {as_code(field['doc'])}" if "doc" in field else ""
        out += doc(f"`{row['name']}.{field['name']}`{says}", indent)
        out.append(f"{' ' * indent}{declare(field)},")
    return out


def call_groups(row):
    """The fields of a call by what the methods take."""
    fields, written = row["fields"], tensors(row, "out")
    read = [name for name in tensors(row) if name not in written]
    typed = [f for f in settings(row) if f["type"]["kind"] != "record"]
    return {
        "read": lines(row, [f for f in fields if f["name"] in read], 12),
        "write": lines(row, [f for f in fields if f["name"] in written], 12),
        "list": lines(row, [f for f in fields if pointee(f, "record") == "moec_tensor"], 12),
        "set": lines(row, typed, 12, lambda f: f"{f['name']}: {type_name(f['type'])}"),
        "handle": lines(
            row, [f for f in fields if pointee(f, "handle") in HANDLES], 12,
            lambda f: f"{f['name']}: {HANDLES[pointee(f, 'handle')]}",
        ),
        "matrices": lines(
            row, [f for f in fields if pointee(f, "record") == "moec_weight_set"], 12
        ),
        "buffer": lines(
            row, [f for f in fields if f["type"] == BUFFER], 12,
            lambda f: f"{f['name']}, {f['name']}_array, {f['name']}_on_device",
        ),
    }


def parts_of_matrix(api):
    """The fields of a matrix that point to a struct."""
    return [f for f in struct(api, "moec_matrix")["fields"]
            if pointee(f, "record") not in (None, "moec_tensor")]


def camel(name):
    return "".join(part.capitalize() for part in name.removeprefix("moec_").split("_"))


def builders(api):
    """The builders of calls, and of what a matrix points to."""
    parts = [struct(api, pointee(f, "record")) for f in parts_of_matrix(api)]
    first = {p["name"]: p.get("doc", "Part of a matrix.").split(". ")[0].rstrip(".") for p in parts}
    calls = CALLS | {camel(name): (name, f"{as_code(text)}.") for name, text in first.items()}
    out = ["calls! {"]
    for name, (raw, text) in calls.items():
        out += [*doc(text, 4), f"    {name}: {raw} {{"]
        for group, rows in call_groups(struct(api, raw)).items():
            out += [f"        {group} {{", *rows, "        }"] if rows else []
        out.append("    }")
    return out + ["}", ""]


def of_matrices(api, fields, declare):
    """A row for each field of each matrix: gate_up for the data of gate_up, gate_up_bias."""
    out = []
    for matrix in struct(api, "moec_weight_set")["fields"]:
        for field in fields if matrix["type"] == MATRIX else ():
            name = matrix["name"] + ("" if field["name"] == "data" else f"_{field['name']}")
            out += doc(as_code("; ".join((field.get("doc", ""), matrix["doc"]))), 12)
            out.append(f"            {name}: {matrix['name']}.{declare(field)},")
    return out


def weight_sets(api):
    fields = struct(api, "moec_matrix")["fields"]
    data = [f for f in fields if f["type"] == TENSOR]
    arrays = [f for f in fields if pointee(f, "record") == "moec_tensor"]
    parts = parts_of_matrix(api)
    out = ["weight_sets! {"]
    for name, (tensor, array, text) in SETS.items():
        out += [*doc(text, 4), f"    {name} of {tensor} {{", "        tensors {"]
        out += [*of_matrices(api, data, lambda f: f["name"]), "        }"]
        out += [f"        lists of {array} {{"]
        out += [*of_matrices(api, arrays, lambda f: f["name"]), "        }"]
        if parts and tensor == "Tensor":  # gradients have none
            typed = of_matrices(
                api, parts, lambda f: f"{f['name']} = {camel(pointee(f, 'record'))}"
            )
            out += ["        parts {", *typed, "        }"]
        out.append("    }")
    return out + ["}", ""]


def calls(api):
    return "\n".join([HEAD, *builders(api), *weight_sets(api)])


def descriptors(api):
    out = [HEAD, "descriptors! {"]
    for name, (raw, text) in DESCRIPTORS.items():
        row = struct(api, raw)
        out += [*doc(text, 4), f"    {name}: {raw} {{"]
        out += lines(
            row, settings(row), 8, lambda f: f"{f['name']}: {type_name(f['type'], 'sys::')}"
        )
        out.append("    }")
    return "\n".join(out + ["}", ""])


def emit(api):
    return {
        "rust/moec-sys/src/raw_dynamic.rs": functions(api),
        "rust/moec/src/raw_calls.rs": calls(api),
        "rust/moec/src/raw_descriptors.rs": descriptors(api),
    }
