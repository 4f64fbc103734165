# SPDX-License-Identifier: Apache-2.0
"""What can be said of Moec.jl without running Julia, for every function and not only those that the
tests call: its syntax tree (tree-sitter) beside api.json, and its signatures driven through a
library that records the raw arguments. Prints `N passed, M failed`.

Shown to fail: a field called `function`, a Float32 for a Float64, a missing GC.@preserve, a dropped
status and two exchanged fields are each reported.
"""

import ctypes
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import tree_sitter
import tree_sitter_julia

HERE = pathlib.Path(__file__).resolve().parents[1]
ROOT = HERE.parents[1]
API = json.loads((ROOT / "bindings/api.json").read_text())
FUNCTIONS = {row["name"]: row for row in API["functions"]}
PARSER = tree_sitter.Parser(tree_sitter.Language(tree_sitter_julia.language()))
RECORD = 16  # bytes recorded of each argument

results = {True: 0, False: 0}


def expect(ok, what):
    results[bool(ok)] += 1
    if not ok:
        print(f"static_check: {what}")


def walk(node):
    yield node
    for child in node.children:
        yield from walk(child)


def ancestors(node):
    while (node := node.parent) is not None:
        yield node


def text(node):
    return node.text.decode()


def same(julia, c, structs):
    """Is a Julia type that C type? const does not matter to a caller."""
    numbers = {"int": "Int", "uint": "UInt", "float": "Float"}
    if c["kind"] in numbers:
        return julia == f"{numbers[c['kind']]}{c['bits']}"
    if c["kind"] == "char":
        return julia == "UInt8"
    if c["kind"] in ("record", "handle"):
        return julia == c["name"] and julia in structs
    if c["kind"] == "void":
        return julia == "Cvoid"
    if c["kind"] == "function":
        return julia == "Ptr{Cvoid}"
    tuple_ = re.fullmatch(r"NTuple\{(\d+),(\w+)\}", julia)
    if c["kind"] == "array" and tuple_:
        return int(tuple_[1]) == c["count"] and same(tuple_[2], c["of"], structs)
    pointee = re.fullmatch(r"Ptr\{(.+)\}", julia)
    return bool(pointee) and same(pointee[1], c.get("to", c.get("of")), structs)


def layout(julia, structs):
    """(bytes, alignment) by Julia's rule for isbits structs."""
    if tuple_ := re.fullmatch(r"NTuple\{(\d+),(\w+)\}", julia):
        size, alignment = layout(tuple_[2], structs)
        return int(tuple_[1]) * size, alignment
    if julia.startswith("Ptr{"):
        return 8, 8
    if julia in structs:
        return structs[julia]["bytes"], structs[julia]["alignment"]
    size = int(re.search(r"\d+$", julia)[0]) // 8
    return size, size


def add_struct(node, structs):
    name = text(next(c for c in node.children if c.type == "type_head"))
    fields = [tuple(text(c).split("::")) for c in node.children if c.type == "typed_expression"]
    offset, alignment, offsets = 0, 1, []
    for _, kind in fields:
        size, align = layout(kind, structs)
        offset = -(-offset // align) * align
        offsets.append(offset)
        offset, alignment = offset + size, max(alignment, align)
    size = -(-offset // alignment) * alignment
    structs[name] = {
        "fields": fields, "offsets": offsets, "bytes": size, "alignment": alignment,
    }


def check_structs(structs):
    for row in API["structs"]:
        got = structs.get(row["name"])
        expect(got and got["bytes"] == row["bytes"], f"{row['name']} is not {row['bytes']} bytes")
        if got is None:
            continue
        wanted = [(f["name"], f["offset"]) for f in row["fields"]]
        found = [(f[0], o) for f, o in zip(got["fields"], got["offsets"])]
        expect(found == wanted, f"fields of {row['name']}: {set(wanted) ^ set(found)}")
        for (name, kind), field in zip(got["fields"], row["fields"]):
            expect(same(kind, field["type"], structs), f"{row['name']}.{name} is a {kind}")


def ccalls(tree):
    """(name, argument types, return type) of every @ccall."""
    for node in walk(tree.root_node):
        if node.type != "macrocall_expression" or not text(node).startswith("@ccall"):
            continue
        typed = node.children[1].children[0]
        call = typed.children[0]
        arguments = call.children[1].named_children
        library, name = text(call.children[0]).split(".")
        expect(library == "LIB", f"{name} is looked up in {library}, not in the constant LIB")
        yield name, [text(a).split("::")[1] for a in arguments], text(typed.children[-1])


def check_signatures(found, structs):
    expect(sorted(found) == sorted(FUNCTIONS), f"functions: {set(found) ^ set(FUNCTIONS)}")
    for name, (arguments, result) in found.items():
        row = FUNCTIONS[name]
        expect(same(result, row["returns"], structs), f"{name} returns {result}")
        expect(len(arguments) == len(row["arguments"]), f"{name} has {len(arguments)} arguments")
        for kind, argument in zip(arguments, row["arguments"]):
            expect(same(kind, argument["type"], structs), f"{name}: {argument['name']} is {kind}")


def c_type(kind):
    if kind["kind"] == "float":
        return "float" if kind["bits"] == 32 else "double"
    return f"{kind['kind']}{kind['bits']}_t" if kind["kind"] in ("int", "uint") else "void *"


def check_calls(found):
    """Each function of a stand-in library records its arguments; all arrive bit for bit."""
    code = ["#include <stdint.h>", "#include <string.h>", f"unsigned char record[{RECORD * 8}];"]
    for row in API["functions"]:
        kinds = [c_type(a["type"]) for a in row["arguments"]]
        parameters = ", ".join(f"{kind} a{i}" for i, kind in enumerate(kinds)) or "void"
        body = " ".join(
            f"memcpy(record + {RECORD * i}, &a{i}, sizeof a{i});" for i in range(len(kinds)))
        code.append(f"void {row['name']}({parameters}) {{ {body} }}")
    with tempfile.TemporaryDirectory() as folder:
        library = pathlib.Path(folder, "record.so")
        subprocess.run(["cc", "-shared", "-fPIC", "-xc", "-", "-o", library], check=True,
                       input="\n".join(code), text=True)
        recorder = ctypes.CDLL(str(library))
        record = (ctypes.c_ubyte * (RECORD * 8)).in_dll(recorder, "record")
        for name, (arguments, _) in found.items():
            ctypes.memset(record, 0, RECORD * 8)
            kinds = {"Int": "c_int", "UInt": "c_uint", "Float32": "c_float", "Float64": "c_double"}
            types = [getattr(ctypes, "c_void_p" if a.startswith("Ptr") else kinds.get(a) or
                             re.sub(r"^\D+", lambda m: kinds[m[0]], a)) for a in arguments]
            values = [kind(3.25 if "Float" in a else 0x5A5A5A00 + i)
                      for i, (a, kind) in enumerate(zip(arguments, types))]
            function = getattr(recorder, name)
            function.argtypes = types
            function(*values)
            got = [bytes(record[RECORD * i:RECORD * i + ctypes.sizeof(k)])
                   for i, k in enumerate(types)]
            expect(got == [bytes(v) for v in values], f"{name}: an argument does not arrive")


def check_habits(path, tree):
    """Of hand-written sources: pointers preserved, statuses checked, handles finalized."""
    for node in walk(tree.root_node):
        if node.type == "call_expression":
            name, above = text(node.children[0]), list(ancestors(node))
            if name == "pointer":
                kept = any(a.type == "macrocall_expression" and "GC.@preserve" in text(a)[:12]
                           for a in above)
                expect(kept, f"{path.name}: {text(node)} outside GC.@preserve")
            called = name.removeprefix("Raw.")
            if name.startswith("Raw.") and FUNCTIONS.get(called, {}).get("status"):
                around = [text(a) for a in above[:8]]
                used = any(a.startswith(("check(", "created(", "make(")) for a in around)
                expect(used or called == "moec_last_error", f"{path.name}: {called} is not checked")
        if node.type == "struct_definition" and text(node).startswith("mutable"):
            expect("finalizer(close" in text(node), f"{path.name}: a handle without a finalizer")


def main():
    structs, found = {}, {}
    for path in [*HERE.rglob("*.jl"), *(ROOT / "examples/julia").glob("*.jl")]:
        tree = PARSER.parse(path.read_bytes())
        expect(not tree.root_node.has_error, f"{path.relative_to(ROOT)} does not parse")
        generated = path.name == "raw.jl"
        for node in walk(tree.root_node):
            if node.type == "struct_definition" and generated:
                add_struct(node, structs)
        found |= {name: (arguments, result) for name, arguments, result in ccalls(tree)}
        if not generated and path.parent.name in ("src", "ext"):
            check_habits(path, tree)
    check_structs(structs)
    check_signatures(found, structs)
    check_calls(found)
    print(f"{results[True]} passed, {results[False]} failed")
    return int(results[False] > 0)


if __name__ == "__main__":
    sys.exit(main())
