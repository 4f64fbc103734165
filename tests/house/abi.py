#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The ABI guard: what moec.h promises, and whether a change keeps it.

    abi.py check HEADER [LIBRARY]   today's header (and library) against capi/abi
    abi.py bless HEADER             write today's header to capi/abi

`moec-N.json` is the promise of SONAME N, `symbols.txt` the sorted exports. Allowed: a new
function, constant or type, and a field appended to a struct that starts with struct_size. Anything
else breaks callers that were compiled before.
"""

import json
import subprocess
import sys
from pathlib import Path

from clang.cindex import CursorKind, Diagnostic, Index, TypeKind

ABI_DIR = Path(__file__).parents[2] / "capi" / "abi"
FORBIDDEN = {  # rules of the header: what some binding language cannot say, or says another width
    TypeKind.ENUM: "an enum type, whose width is the compiler's choice",
    TypeKind.BOOL: "bool",
    TypeKind.LONG: "long, whose width differs between systems",
    TypeKind.ULONG: "unsigned long, whose width differs between systems",
}


def parse(header):
    """The cursors that `header` itself declares."""
    include = subprocess.run(["gcc", "-print-file-name=include"], capture_output=True, text=True,
                             check=True).stdout.strip()
    unit = Index.create().parse(str(header), args=["-x", "c", "-std=c11", "-isystem", include])
    errors = [d.spelling for d in unit.diagnostics if d.severity >= Diagnostic.Error]
    if errors:
        sys.exit(f"abi: {header}: {errors[0]}")
    return [c for c in unit.cursor.get_children() if str(c.location.file) == str(header)]


def fields_of(cursor):
    return [
        [f.spelling, f.type.spelling, cursor.type.get_offset(f.spelling) // 8, f.type.get_size()]
        for f in cursor.type.get_fields()
    ]


def snapshot(header):
    """{constants, types, functions, structs} of a header, all that a caller's binary relies on."""
    api = {"constants": {}, "types": {}, "functions": {}, "structs": {}}
    for cursor in parse(header):
        name = cursor.spelling
        if cursor.kind == CursorKind.ENUM_DECL:
            api["constants"].update({c.spelling: c.enum_value for c in cursor.get_children()})
        elif cursor.kind == CursorKind.TYPEDEF_DECL:
            api["types"][name] = cursor.underlying_typedef_type.get_canonical().spelling
        elif cursor.kind == CursorKind.FUNCTION_DECL:
            arguments = [a.type.spelling for a in cursor.get_arguments()]
            api["functions"][name] = [cursor.result_type.spelling, *arguments]
        elif cursor.kind == CursorKind.STRUCT_DECL and cursor.is_definition():
            api["structs"][name] = {"size": cursor.type.get_size(), "fields": fields_of(cursor)}
    return api


def is_sized(struct):
    return bool(struct["fields"]) and struct["fields"][0][0] == "struct_size"


def compare(old, new):
    """The breaks between two snapshots, in words."""
    for kind in ("constants", "types", "functions", "structs"):
        for name in sorted(old[kind].keys() - new[kind].keys()):
            yield f"{name} was removed"
    for name, value in old["constants"].items():
        if new["constants"].get(name, value) != value:
            yield f"{name} was {value}, is {new['constants'][name]}: renumbered"
    for name, what in old["types"].items():
        if new["types"].get(name, what) != what:
            yield f"{name} was {what}, is {new['types'][name]}"
    for name, signature in old["functions"].items():
        if new["functions"].get(name, signature) != signature:
            was, now = (f"{s[0]} ({', '.join(s[1:])})" for s in (signature, new["functions"][name]))
            yield f"{name} was {was}, is {now}: signature"
    for name, struct in old["structs"].items():
        if name in new["structs"]:
            yield from compare_struct(name, struct, new["structs"][name])


def compare_struct(name, old, new):
    for was, now in zip(old["fields"], new["fields"]):
        if was != now:
            yield f"{name}: {describe_field(was)} is now {describe_field(now)}: layout moved"
            return
    if len(new["fields"]) < len(old["fields"]):
        yield f"{name}: field {old['fields'][len(new['fields'])][0]} was removed"
    elif new["size"] != old["size"] and not is_sized(old):
        yield f"{name} was {old['size']} bytes, is {new['size']}; without struct_size it is frozen"
    elif any(field[2] < old["size"] for field in new["fields"][len(old["fields"]):]):
        yield f"{name}: a field was added inside the old {old['size']} bytes, not after them"


def describe_field(field):
    return f"{field[1]} {field[0]} at {field[2]}"


def bad_type(kind_of_use, clang_type):
    """Why a type may not appear in a signature or a field, or None."""
    canonical = clang_type.get_canonical()
    while canonical.kind in (TypeKind.CONSTANTARRAY, TypeKind.POINTER):
        element = canonical.element_type if canonical.kind == TypeKind.CONSTANTARRAY else None
        canonical = (element or canonical.get_pointee()).get_canonical()
    spelled = clang_type.spelling.split("[")[0].replace("const", "").strip(" *")
    if spelled in ("int64_t", "uint64_t", "size_t"):
        return None  # a long on this system only
    if canonical.kind in FORBIDDEN:
        return FORBIDDEN[canonical.kind]
    if kind_of_use == "argument" and clang_type.get_canonical().kind == TypeKind.RECORD:
        return "a struct by value"
    return None


def header_rules(header):
    """Breaches of the rules that hold for the header by itself."""
    sized = {f"struct {name}" for name, s in snapshot(header)["structs"].items() if is_sized(s)}
    for cursor in parse(header):
        name = cursor.spelling
        if cursor.kind == CursorKind.UNION_DECL:
            yield f"{name}: a union"
        if cursor.kind == CursorKind.FUNCTION_DECL:
            if cursor.type.kind == TypeKind.FUNCTIONNOPROTO or cursor.type.is_function_variadic():
                yield f"{name}: variable arguments, or none said; write (void)"
            for argument in [cursor.result_type, *(a.type for a in cursor.get_arguments())]:
                reason = bad_type("argument", argument)
                if reason:
                    yield f"{name}: {argument.spelling} is {reason}"
        if cursor.kind != CursorKind.STRUCT_DECL or not cursor.is_definition():
            continue
        for field in cursor.type.get_fields():
            reason = bad_type("field", field.type)
            if field.is_bitfield():
                reason = "a bit field"
            elif field.type.get_canonical().spelling.split("[")[0].strip() in sized:
                reason = "a struct with struct_size by value; hold a pointer, so that it can grow"
            if reason:
                yield f"{name}.{field.spelling}: {reason}"
        if f"struct {name}" in sized and cursor.type.get_size() % 8:
            yield f"{name}: {cursor.type.get_size()} bytes; a multiple of 8 is needed"


def exports(library):
    """Dynamic symbols that a library defines, version nodes left out."""
    listing = subprocess.run(["nm", "-D", "--defined-only", str(library)], capture_output=True,
                             text=True, check=True).stdout
    rows = [line.split() for line in listing.splitlines()]
    return sorted(row[2].split("@")[0] for row in rows if row[1] != "A")


def differences(names, expected, what):
    for name in sorted(set(names) - set(expected)):
        yield f"{name} is {what[0]} but not {what[1]}"
    for name in sorted(set(expected) - set(names)):
        yield f"{name} is {what[1]} but not {what[0]}"


def abi_version(header):
    return next(line.split()[2] for line in Path(header).read_text().splitlines()
                if line.startswith("#define MOEC_ABI_VERSION"))


def check(header, library=None, directory=ABI_DIR):
    promise = json.loads((directory / f"moec-{abi_version(header)}.json").read_text())
    symbols = (directory / "symbols.txt").read_text().split()
    today = snapshot(header)
    yield from header_rules(header)
    yield from compare(promise, today)
    yield from differences(today["functions"], symbols, ("in moec.h", "in symbols.txt"))
    if library:
        yield from differences(exports(library), symbols, ("exported", "in symbols.txt"))


def bless(header, directory=ABI_DIR):
    broken = list(header_rules(header))
    if broken:
        return broken
    today = snapshot(header)
    directory.mkdir(exist_ok=True)
    text = json.dumps(today, indent=1, sort_keys=True)
    text = text.replace("[\n     ", "[").replace(",\n     ", ", ").replace("\n    ]", "]")
    (directory / f"moec-{abi_version(header)}.json").write_text(text + "\n")
    (directory / "symbols.txt").write_text("".join(f"{n}\n" for n in sorted(today["functions"])))
    return []


def main():
    verb, *paths = sys.argv[1:]
    found = list({"check": check, "bless": bless}[verb](*paths))
    print("".join(f"abi: {line}\n" for line in found), end="")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
