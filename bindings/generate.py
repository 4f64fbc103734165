# SPDX-License-Identifier: Apache-2.0
"""moec.h -> api.json and the low-level layers of Julia and Go.

    python bindings/generate.py           rewrite the generated files
    python bindings/generate.py --check   fail if regenerating would change one

SWIG (Python) and bindgen (Rust) read moec.h themselves; api.json checks all of them.
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
    return " ".join(re.sub(r"\n\s*\*", " ", text).split())


def read_header():
    include = subprocess.run(
        ["gcc", "-print-file-name=include"], capture_output=True, text=True, check=True
    ).stdout.strip()
    args = ["-x", "c", "-std=c11", "-isystem", include]
    unit = cindex.Index.create().parse(str(HEADER), args=args)
    errors = [d.spelling for d in unit.diagnostics if d.severity >= cindex.Diagnostic.Error]
    if errors:
        sys.exit(f"generate.py: {HEADER.name}: {errors[0]}")
    lines = HEADER.read_text().splitlines()
    macros = re.findall(r"^#define (MOEC_\w+) (\d+)\b", HEADER.read_text(), re.MULTILINE)
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
                    "fields": [
                        {
                            "name": f.spelling,
                            "offset": cursor.type.get_offset(f.spelling) // 8,
                            "bytes": f.type.get_size(),
                            "type": describe_type(f.type),
                        }
                        for f in fields
                    ],
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
    return api


def main():
    api = read_header()
    outputs = {ROOT / "api.json": json.dumps(api, indent=1) + "\n"}
    for emitter in (emit_julia, emit_go, emit_rust):
        outputs |= {ROOT / name: text for name, text in emitter.emit(api).items()}
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
