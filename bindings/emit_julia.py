# SPDX-License-Identifier: Apache-2.0
"""The raw Julia layer: isbits structs with keyword constructors, constants, a method a function."""

import re

from fields import spoken

NUMBERS = {"int": "Int", "uint": "UInt", "float": "Float"}


def type_name(kind):
    if kind["kind"] in NUMBERS:
        return f"{NUMBERS[kind['kind']]}{kind['bits']}"
    if kind["kind"] == "char":
        return "UInt8"
    if kind["kind"] in ("record", "handle"):
        return kind["name"]
    if kind["kind"] == "array":
        return f"NTuple{{{kind['count']},{type_name(kind['of'])}}}"
    if kind["kind"] == "pointer":
        inner = "Cvoid" if kind["to"]["kind"] == "void" else type_name(kind["to"])
        return f"Ptr{{{inner}}}"
    return {"function": "Ptr{Cvoid}", "void": "Cvoid"}[kind["kind"]]


def zero(kind):
    if kind["kind"] == "array":
        return f"ntuple(_ -> {zero(kind['of'])}, {kind['count']})"
    if kind["kind"] == "record":
        return f"{kind['name']}()"
    if kind["kind"] in ("pointer", "function"):
        return "C_NULL"
    return f"{type_name(kind)}(0)"


def argument_type(kind):
    if kind["kind"] == "array":  # a C array parameter is a pointer
        return f"Ptr{{{type_name(kind['of'])}}}"
    return type_name(kind)


def documentation(text):
    """A docstring, of one line or more."""
    quoted = re.sub(r'[\\"$]', r"\\\g<0>", text)
    return [f'"""\n{quoted}\n"""' if "\n" in text else f'"{quoted}"'] if text else []


def fields_list(row):
    """The fields that moec.h comments, as a Markdown list."""
    said = [(f["name"], re.sub(r"\[[^]]*\]", r"`\g<0>`", spoken(f))) for f in row["fields"]]
    return [f"- `{name}`: {text}" for name, text in said if text]


def struct(row):
    name, said = row["name"], fields_list(row)
    head = [row["doc"], ""] if row["doc"] and said else [row["doc"] or f"Fields of `{name}`:"]
    lines = documentation("\n".join(head + said) if said else row["doc"])
    lines.append(f"struct {name}")
    lines += [f"    {f['name']}::{type_name(f['type'])}" for f in row["fields"]]
    lines.append("end")
    defaults = []
    for field in row["fields"]:
        value = f"UInt32({row['bytes']})" if field["name"] == "struct_size" else zero(field["type"])
        defaults.append(f"    {field['name']} = {value},")
    lines.append(f"{name}(;")
    lines += defaults
    names = ", ".join(f["name"] for f in row["fields"])
    lines += [f") = {name}({names})", ""]
    return lines


def function(row):
    names = ", ".join(a["name"] for a in row["arguments"])
    typed = ", ".join(f"{a['name']}::{argument_type(a['type'])}" for a in row["arguments"])
    lines = documentation(row["doc"])
    lines.append(f"{row['name']}({names}) =")
    lines.append(f"    @ccall LIB.{row['name']}({typed})::{type_name(row['returns'])}")
    return lines + [""]


def emit(api):
    lines = [
        "# SPDX-License-Identifier: Apache-2.0",
        "# Generated from moec.h by generate.py; do not edit.",
        "",
    ]
    lines += [f"const {name} = UInt32({value})" for name, value in api["macros"].items()]
    for row in api["constants"]:
        kind = "Int32" if row["enum"] == "moec_status_code" or row["value"] < 0 else "UInt32"
        lines.append(f"const {row['name']} = {kind}({row['value']})")
    lines.append("")
    lines += [f"struct {name} end" for name in api["handles"]] + [""]
    for row in api["structs"]:
        lines += struct(row)
    lines.append(
        "# (struct, bytes, field offsets) as the C compiler lays them out; asserted by the tests"
    )
    lines.append("const LAYOUT = (")
    for row in api["structs"]:
        offsets = ", ".join(str(f["offset"]) for f in row["fields"])
        lines.append(f"    ({row['name']}, {row['bytes']}, ({offsets},)),")
    lines += [")", ""]
    for row in api["functions"]:
        lines += function(row)
    return {"julia/src/raw.jl": "\n".join(lines).rstrip() + "\n"}
