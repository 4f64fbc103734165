# SPDX-License-Identifier: Apache-2.0
"""moec.h -> api.json, the low-level layers of Julia and Go, the argument lists of all languages.

    python bindings/generate.py           rewrite the generated files
    python bindings/generate.py --check   fail if regenerating would change one

SWIG (Python) and bindgen (Rust) read moec.h themselves; api.json checks all of them.

A field's comment becomes its `doc`. That of an array starts with `in` or `out`, which becomes its
`role`.
"""

import json
import pathlib
import re
import subprocess
import sys

from clang import cindex
from clang.cindex import CursorKind, TypeKind

import emit_go
import emit_julia
import emit_python
import emit_rust

ROOT = pathlib.Path(__file__).resolve().parent
HEADER = ROOT.parent / "capi/include/moec/moec.h"


def bare(spelling):
    return re.sub(r"\b(const|struct)\b", "", spelling).replace("  ", " ").strip()


def describe_type(kind):
    """{'kind': int|uint|float|char|void|record|handle|pointer|function|array, ...} of a C type."""
    if kind.spelling == "size_t":  # a type of its own in Rust
        return {"kind": "uint", "bits": 64, "name": "size_t"}
    target = kind.get_canonical()
    if target.kind == TypeKind.POINTER:
        pointee = target.get_pointee()
        if pointee.get_canonical().kind == TypeKind.FUNCTIONPROTO:
            return {"kind": "function"}
        return {
            "kind": "pointer",
            "const": pointee.is_const_qualified(),
            "to": describe_type(pointee),
        }
    if target.kind in (TypeKind.CONSTANTARRAY, TypeKind.INCOMPLETEARRAY):
        return {
            "kind": "array",
            "count": max(target.element_count, 0),
            "of": describe_type(target.element_type),
        }
    if target.kind == TypeKind.RECORD:
        opaque = not list(target.get_fields())
        return {"kind": "handle" if opaque else "record", "name": bare(target.spelling)}
    if target.kind == TypeKind.VOID:
        return {"kind": "void"}
    if target.kind in (TypeKind.FLOAT, TypeKind.DOUBLE):
        return {"kind": "float", "bits": 8 * target.get_size()}
    if target.kind in (TypeKind.CHAR_S, TypeKind.CHAR_U):
        return {"kind": "char"}
    signed = target.kind in (TypeKind.INT, TypeKind.LONG, TypeKind.LONGLONG, TypeKind.SHORT)
    return {"kind": "int" if signed else "uint", "bits": 8 * target.get_size()}


def comment_before(lines, cursor):
    """Plain /* */ comments are not attached by clang: take the one that ends on the line before."""
    end = cursor.extent.start.line - 2
    if end < 0 or not lines[end].rstrip().endswith("*/"):
        return ""
    start = end
    while not lines[start].lstrip().startswith("/*"):
        start -= 1
    text = "\n".join(lines[start : end + 1]).replace("/*", "").replace("*/", "")
    return squeezed(text)


def squeezed(comment):
    return " ".join(re.sub(r"\n\s*\*", " ", comment).split())


def comments_of(cursor, fields, text):
    """(end, comment) of each field's declaration. The comment stands behind it on the line where it
    ends, or above it."""
    behind = re.compile(r"[{;] */\*(.*?)\*/", re.DOTALL)
    begin = text.index("{", cursor.extent.start.offset)
    out = []
    for field in fields:
        offset = field.location.offset
        end = text.index(";", offset)
        if out and out[-1][0] == end:  # in one declaration with the field before
            out.append(out[-1])
            continue
        last = behind.match(text, begin)
        above = re.search(r"/\*(.*?)\*/", text[last.end() if last else begin : offset], re.DOTALL)
        found = behind.match(text, end) or above
        out.append((end, squeezed(found[1]) if found else ""))
        begin = end
    return out


def part_of(doc, index, count):
    """What is said of one of `count` fields by `[V,K], [T] i32`, or by `H, I`, behind all."""
    found = re.match(r"\[[^]]*\](, \[[^]]*\])+", doc) or re.fullmatch(r"\w+(, \w+)+", doc)
    parts = found[0].split(", ") if found else []
    return parts[index] + doc[found.end() :] if count > 1 and len(parts) == count else doc


def holds_array(kind):
    """A tensor, a buffer, a weight set, or a pointer to one."""
    record = kind["to"] if kind["kind"] == "pointer" else kind
    return record.get("name") in ("moec_tensor", "moec_buffer", "moec_weight_set")


def read_fields(cursor, text):
    fields = list(cursor.type.get_fields())
    comments = comments_of(cursor, fields, text)
    declared = [end for end, _ in comments]
    out = []
    for f, (end, doc) in zip(fields, comments):
        kind = describe_type(f.type)
        row = {
            "name": f.spelling,
            "offset": cursor.type.get_offset(f.spelling) // 8,
            "bytes": f.type.get_size(),
            "type": kind,
        }
        role = re.match(r"(in|out)\b[,;]? *", doc)
        if role and holds_array(kind):
            row["role"], doc = role[1], doc[role.end() :]
        elif cursor.spelling.endswith("_args") and kind.get("name") == "moec_tensor":
            sys.exit(f"generate.py: {cursor.spelling}.{f.spelling} is neither `in` nor `out`")
        doc = part_of(doc, len(out) - declared.index(end), declared.count(end))
        # `struct_size, flags; /* moec_x_flags */` is about the flags.
        out.append(row | ({"doc": doc} if doc and f.spelling != "struct_size" else {}))
    return out


def resolve_references(structs):
    """Say what `as forward` and `as moec_gate_args` stand for. The layer's gate_bias is the bias of
    moec_gate_args."""
    by_name = {row["name"]: {f["name"]: f for f in row["fields"]} for row in structs}
    for row in structs:
        for field in row["fields"]:
            found = re.fullmatch(r"as (forward|moec_\w+)", field.get("doc", ""))
            if not found:
                continue
            name = found[1].replace("forward", row["name"].replace("_grad", ""))
            noun = name.removeprefix("moec_").removesuffix("args")
            there = by_name[name]
            of = there.get(field["name"]) or there[field["name"].removeprefix(noun)]
            if "doc" in of:
                field["doc"] = of["doc"]


def read_header(header=HEADER):
    include = subprocess.run(
        ["gcc", "-print-file-name=include"], capture_output=True, text=True, check=True
    ).stdout.strip()
    args = ["-x", "c", "-std=c11", "-isystem", include]
    unit = cindex.Index.create().parse(str(header), args=args)
    errors = [d.spelling for d in unit.diagnostics if d.severity >= cindex.Diagnostic.Error]
    if errors:
        sys.exit(f"generate.py: {header.name}: {errors[0]}")
    text = header.read_text()
    lines = text.splitlines()
    macros = re.findall(r"^#define (MOEC_\w+) (\d+)\b", text, re.MULTILINE)
    api = {"macros": {name: int(value) for name, value in macros}}
    api |= {"handles": [], "constants": [], "structs": [], "functions": []}
    for cursor in unit.cursor.get_children():
        if not str(cursor.location.file).endswith("moec.h"):
            continue
        if cursor.kind == CursorKind.STRUCT_DECL:
            fields = list(cursor.type.get_fields())
            if not fields:
                if cursor.spelling not in api["handles"]:
                    api["handles"].append(cursor.spelling)
                continue
            api["structs"].append(
                {
                    "name": cursor.spelling,
                    "bytes": cursor.type.get_size(),
                    "sized": fields[0].spelling == "struct_size",
                    "doc": comment_before(lines, cursor),
                    "fields": read_fields(cursor, text),
                }
            )
        elif cursor.kind == CursorKind.ENUM_DECL:
            for item in cursor.get_children():
                api["constants"].append(
                    {"name": item.spelling, "value": item.enum_value, "enum": cursor.spelling}
                )
        elif cursor.kind == CursorKind.FUNCTION_DECL:
            api["functions"].append(
                {
                    "name": cursor.spelling,
                    "doc": comment_before(lines, cursor),
                    "returns": describe_type(cursor.result_type),
                    "status": cursor.result_type.spelling == "moec_status",
                    "arguments": [
                        {"name": a.spelling, "type": describe_type(a.type)}
                        for a in cursor.get_arguments()
                    ],
                }
            )
    resolve_references(api["structs"])
    return api


def generate(header=HEADER):
    """The text of every generated file, by its path in bindings."""
    api = read_header(header)
    outputs = {"api.json": json.dumps(api, indent=1) + "\n"}
    for emitter in (emit_julia, emit_go, emit_rust, emit_python):
        outputs |= emitter.emit(api)
    return outputs


def main():
    outputs = {ROOT / name: text for name, text in generate().items()}
    stale = [p for p, text in outputs.items() if not p.exists() or p.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(
                f"generate.py: {path.relative_to(ROOT.parent)} is stale; run generate.py"
            )
        sys.exit(bool(stale))
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(outputs[path])
        print(f"generate.py: wrote {path.relative_to(ROOT.parent)}")


if __name__ == "__main__":
    main()
