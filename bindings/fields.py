# SPDX-License-Identifier: Apache-2.0
"""What the emitters ask about the structs of api.json."""

TENSOR = {"kind": "record", "name": "moec_tensor"}
BUFFER = {"kind": "record", "name": "moec_buffer"}
MATRIX = {"kind": "record", "name": "moec_matrix"}


def struct(api, name):
    return next(row for row in api["structs"] if row["name"] == name)


def pointee(field, kind):
    """The name of the `kind`, a handle or a record, that a field points to, or None."""
    target = field["type"].get("to", {})
    return target["name"] if target.get("kind") == kind else None


def tensors(row, role=None):
    """Names of the tensors, those that a call reads (`in`), or those that it writes (`out`)."""
    return [
        f["name"] for f in row["fields"]
        if f["type"] == TENSOR and role in (None, f.get("role"))
    ]


def gradients(row):
    """Names of the tensors whose gradients a call writes."""
    return [name.removeprefix("d_") for name in tensors(row, "out")]


def settings(row):
    """The numbers and small structs of a struct. Its flags count where the header says which."""
    return [
        f for f in row["fields"]
        if f["type"]["kind"] in ("int", "uint", "float", "record")
        and f["type"] not in (TENSOR, BUFFER)
        and not f["name"].startswith(("struct_size", "reserved"))
        and (f["name"] != "flags" or "doc" in f)
    ]


def spoken(field):
    """The comment of a field, as it stands in the header."""
    role, doc = field.get("role", ""), field.get("doc", "")
    return f"{role}{'' if doc.startswith('[') else ','} {doc}" if role and doc else role or doc


def reached(api, roots):
    """These structs and all that they hold or point to, but tensors, buffers and handles."""
    out, open_ = {}, list(roots)
    while open_:
        row = struct(api, open_.pop(0))
        if row["name"] in out:
            continue
        out[row["name"]] = row
        for field in row["fields"]:
            kind = field["type"].get("to", field["type"])
            if kind["kind"] == "record" and kind["name"] not in ("moec_tensor", "moec_buffer"):
                open_.append(kind["name"])
    return list(out.values())
