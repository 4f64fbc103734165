# SPDX-License-Identifier: Apache-2.0
"""The raw Go layer: mirror structs (every pointer a uintptr), and each function twice, through
cgo shims and through dlopen. Handles and streams are uintptr in both: small values never become
Go pointers. And of package moec the structs that calls take, with their way to the mirrors."""

import textwrap

from fields import BUFFER, TENSOR, pointee, reached, settings, spoken

HEAD = """// SPDX-License-Identifier: Apache-2.0
// Code generated from moec.h by generate.py; DO NOT EDIT.
"""


CALLS = (
    "moec_layer_args", "moec_layer_grad_args", "moec_experts_args", "moec_experts_grad_args",
)  # package moec has them and what they reach
TEXTS = {
    "moec_matrix": "is one expert matrix with its optional bias, or their gradients.",
    "moec_quant": "says how the codes of a matrix become values; its scheme says which arrays.",
    "moec_weight_set": "holds the matrices of a set of experts, or their gradients, as the "
    "descriptor's layout says.",
    "moec_layer_args": "are the arguments of a forward call.",
    "moec_layer_grad_args": "are the arguments of a backward call; every absent output is skipped.",
    "moec_experts_args": "are the arguments of a forward call of experts on a plan.",
    "moec_experts_grad_args": "are those of its backward call; every absent output is skipped.",
    "moec_adapter": "holds the terms of one adapter (LoRA), or their gradients.",
    "moec_factors": "are A and B of one matrix: y += Scale * (x A^T) B^T; or their gradients.",
}
# Of what else a struct points to there is no type.
HANDLES = {"moec_weights", "moec_plan", "moec_adapters"}


def camel(name):
    return "".join(part[:1].upper() + part[1:] for part in name.replace("moec_", "", 1).split("_"))


def field_type(kind):
    if kind["kind"] in ("int", "uint", "float"):
        return f"{kind['kind']}{kind['bits']}"
    if kind["kind"] == "char":
        return "byte"
    if kind["kind"] == "record":
        return camel(kind["name"])
    if kind["kind"] == "array":
        return f"[{kind['count']}]{field_type(kind['of'])}"
    return "uintptr"


def is_address(kind):
    """A handle or a stream: passed as a number. Other pointers point to memory of the caller."""
    return kind["kind"] == "pointer" and kind["to"]["kind"] in ("handle", "void")


def argument_type(kind):
    if kind["kind"] in ("pointer", "array"):
        return "uintptr" if is_address(kind) else "unsafe.Pointer"
    return "uintptr" if kind["kind"] == "function" else field_type(kind)


def is_text(kind):
    return kind["kind"] == "pointer" and kind["to"]["kind"] == "char"


def result_type(kind):
    return {"void": ""}.get(kind["kind"], "uintptr" if is_text(kind) else field_type(kind))


def c_type(kind):
    """The shim's parameter: uintptr_t where Go has uintptr, void * where it has unsafe.Pointer."""
    go = argument_type(kind)
    if go in ("uintptr", "unsafe.Pointer"):
        return {"uintptr": "uintptr_t", "unsafe.Pointer": "void *"}[go]
    return {"float32": "float", "float64": "double"}.get(go, f"{go}_t")


def parameters(row, kind_of):
    return ", ".join(f"{go_name(a['name'])} {kind_of(a['type'])}" for a in row["arguments"])


def go_name(name):
    parts = name.split("_")
    word = parts[0] + "".join(p.capitalize() for p in parts[1:])
    return {"type": "kind", "func": "function", "range": "extent"}.get(word, word)


def comment(text):
    return textwrap.wrap(text, 96, initial_indent="\t// ", subsequent_indent="\t// ",
                         break_long_words=False, break_on_hyphens=False)


def types(api):
    out = [HEAD, "package raw", "", "// Of the header that this package was made from.", "const ("]
    out += [f"\tHeader{camel(k.lower())} = {v}" for k, v in api["macros"].items()]
    out += [")", "", "const ("]
    for row in api["constants"]:
        out.append(f"\t{camel(row['name'].lower().replace('moec_', 'moec_', 1))} = {row['value']}")
    out.append(")")
    for row in api["structs"]:
        out += ["", f"// {camel(row['name'])} mirrors {row['name']}. {row['doc']}".rstrip()]
        out.append(f"type {camel(row['name'])} struct {{")
        for field in row["fields"]:
            out += comment(spoken(field))
            out.append(f"\t{camel(field['name'])} {field_type(field['type'])}")
        out.append("}")
    out += [
        "",
        "// Layout is what the C compiler says: bytes of a struct and offsets of its fields.",
    ]
    out += ["type Layout struct {", "\tValue any", "\tBytes uintptr", "\tOffsets []uintptr", "}"]
    out += [
        "",
        "// Layouts lists every struct of moec.h; the tests compare.",
        "var Layouts = []Layout{",
    ]
    for row in api["structs"]:
        offsets = ", ".join(str(f["offset"]) for f in row["fields"])
        out.append(f"\t{{{camel(row['name'])}{{}}, {row['bytes']}, []uintptr{{{offsets}}}}},")
    return "\n".join(out + ["}", ""])


def cgo(api):
    shims, wrappers = [], []
    for row in api["functions"]:
        name, void = row["name"], row["returns"]["kind"] == "void"
        result = result_type(row["returns"])
        shim = ", ".join(f"{c_type(a['type'])} {a['name']}" for a in row["arguments"]) or "void"
        values = ", ".join(
            (
                f"(void *){a['name']}"
                if c_type(a["type"]) == "uintptr_t" and a["type"]["kind"] != "function"
                else (
                    f"(moec_log_function){a['name']}"
                    if a["type"]["kind"] == "function"
                    else a["name"]
                )
            )
            for a in row["arguments"]
        )
        c_result = "void" if void else "uintptr_t" if result == "uintptr" else f"{result}_t"
        lead = "" if void else "return (uintptr_t)" if result == "uintptr" else "return "
        shims.append(f"static {c_result} go_{name}({shim}) {{ {lead}{name}({values}); }}")
        convert = {"unsafe.Pointer": "{}", "uintptr": "C.uintptr_t({})", "float32": "C.float({})"}
        passed = ", ".join(
            convert.get(argument_type(a["type"]), f"C.{c_type(a['type'])}({{}})").format(
                go_name(a["name"])
            )
            for a in row["arguments"]
        )
        call = f"C.go_{name}({passed})"
        body = call if void else f"return {result}({call})"
        wrappers.append(
            f"func {camel(name)}({parameters(row, argument_type)}) {result} {{ {body} }}"
        )
    return "\n".join(
        [
            HEAD,
            "//go:build cgo && !moec_purego",
            "",
            "package raw",
            "",
            "/*",
            "#cgo pkg-config: moec",
            "#include <moec/moec.h>",
            *shims,
            "*/",
            'import "C"',
            'import "unsafe"',
            "",
        ]
        + wrappers
        + [""]
    )


def purego(api):
    out = [HEAD, "//go:build moec_purego || !cgo", "", "package raw", ""]
    out += ['import "unsafe"', "", "var ("]
    for row in api["functions"]:
        result = result_type(row["returns"])
        out.append(
            f"\t{camel(row['name'])} func({parameters(row, argument_type)}) {result}".rstrip()
        )
    out += [")", "", "var symbols = map[string]any{"]
    out += [f'\t"{row["name"]}": &{camel(row["name"])},' for row in api["functions"]]
    out += ["}", "", "var _ unsafe.Pointer", ""]
    return "\n".join(out)


def friendly(name):
    return camel(name).replace("Ids", "IDs")


def pins_method(name):
    """The method of pins that makes the mirror of a struct: moec_layer_args -> layerArgs."""
    return camel(name)[0].lower() + camel(name)[1:]


def friendly_type(field):
    kind = field["type"]
    if kind == TENSOR:
        return "Tensor"
    if kind == BUFFER:
        return "[]byte"
    if is_list(field):
        return "[]Tensor"
    if is_adapters(field):
        return "[]Adapter"
    if kind["kind"] == "pointer":
        return f"*{camel(kind['to']['name'])}"
    if kind["kind"] == "record":
        return camel(kind["name"])
    return field_type(kind)


def is_list(field):
    """An array of tensors."""
    return pointee(field, "record") == "moec_tensor"


def is_adapters(field):
    """An array of adapters: as many as are bound."""
    return pointee(field, "record") == "moec_adapter"


def friendly_fields(row):
    """The fields that package moec has: all but the count of its arrays of tensors, and handles
    that it has no type for."""
    has_lists = any(is_list(f) for f in row["fields"])
    numbers = [f for f in settings(row) if not has_lists or f["name"] != "count"]
    return [
        f for f in row["fields"]
        if f in numbers
        or f["type"] in (TENSOR, BUFFER)
        or pointee(f, "handle") in HANDLES
        or pointee(f, "record")
    ]


def friendly_struct(row):
    text = TEXTS.get(row["name"], "is part of a call's arguments.")
    out = textwrap.wrap(f"{camel(row['name'])} {text} Fields as in {row['name']}.", 97,
                        initial_indent="// ", subsequent_indent="// ")
    out.append(f"type {camel(row['name'])} struct {{")
    for field in friendly_fields(row):
        name = friendly(field["name"])
        says = spoken(field)
        out += comment(f"{name}: {says}" if says else f"{name} as in {row['name']}")
        out.append(f"\t{name} {friendly_type(field)}")
        if field["type"] == BUFFER:
            out += comment(f"{name}OnDevice, instead of {name}, is in the device's memory")
            out.append(f"\t{name}OnDevice DeviceBuffer")
    return out + ["}", ""]


def pinned(field):
    """The mirror's value of a field, and the condition under which it is set."""
    kind, value = field["type"], f"a.{friendly(field['name'])}"
    if kind == TENSOR:
        return f"p.tensor({value})", None
    if kind == BUFFER:
        return f"p.buffer({value}, {value}OnDevice)", None
    if is_list(field):
        return f"p.tensors({value})", None
    if is_adapters(field):
        return f"p.adapterGrads({value}, a.adapters())", None
    if pointee(field, "handle"):
        return f"{value}.raw", f"{value} != nil"
    if pointee(field, "record"):
        return f"address(p, p.{pins_method(kind['to']['name'])}({value}))", None
    if kind["kind"] == "record":
        return f"*p.{pins_method(kind['name'])}(&{value})", None
    return value, None


def mirror(row):
    name = camel(row["name"])
    out = [f"func (p *pins) {pins_method(row['name'])}(a *{name}) *raw.{name} {{"]
    out += ["\tif a == nil {", "\t\treturn nil", "\t}", f"\tout := new(raw.{name})"]
    out += ["\tout.StructSize = sizeOf(out)"] if row["sized"] else []
    for field in friendly_fields(row):
        value, condition = pinned(field)
        line = f"out.{camel(field['name'])} = {value}"
        out += [f"\tif {condition} {{", f"\t\t{line}", "\t}"] if condition else [f"\t{line}"]
    if any(f["name"] == "count" for f in row["fields"]) and lists_of(row):
        out += ["\tout.Count = p.count(a.lists())"]
    return out + ["\treturn out", "}", ""]


def lists_of(row):
    return [f for f in row["fields"] if is_list(f)]


def lists(row, with_lists):
    """Of a struct with arrays of tensors: all of them, with those of what it points to."""
    own = ", ".join(f"a.{friendly(f['name'])}" for f in lists_of(row))
    out = [f"func (a *{camel(row['name'])}) lists() [][]Tensor {{"]
    out += ["\tif a == nil {", "\t\treturn nil", "\t}", f"\tout := [][]Tensor{{{own}}}"]
    for field in row["fields"]:
        if pointee(field, "record") in with_lists:
            out.append(f"\tout = append(out, a.{friendly(field['name'])}.lists()...)")
    return out + ["\treturn out", "}", ""]


def arguments(api):
    out = [HEAD, "package moec", "", 'import "moec.dev/moec/raw"', ""]
    rows = reached(api, CALLS)
    with_lists = {row["name"] for row in rows if lists_of(row)}
    for row in rows:
        out += friendly_struct(row) + mirror(row)
        out += lists(row, with_lists) if row["name"] in with_lists else []
    return "\n".join(out)


def emit(api):
    return {
        "go/raw_args.go": arguments(api),
        "go/raw/types.go": types(api),
        "go/raw/cgo.go": cgo(api),
        "go/raw/purego.go": purego(api),
    }
