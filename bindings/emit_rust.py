# SPDX-License-Identifier: Apache-2.0
"""The `dynamic` half of moec-sys: bindgen's functions, looked up by dlopen at first use."""

NUMBERS = {"int": "i", "uint": "u", "float": "f"}


def type_name(kind):
    if kind.get("name") == "size_t":
        return "usize"
    if kind["kind"] in NUMBERS:
        return f"{NUMBERS[kind['kind']]}{kind['bits']}"
    if kind["kind"] == "char":
        return "std::os::raw::c_char"
    if kind["kind"] == "void":
        return "std::os::raw::c_void"
    if kind["kind"] in ("record", "handle"):
        return kind["name"]
    if kind["kind"] == "function":
        return "moec_log_function"
    if kind["kind"] == "array":
        return f"*mut {type_name(kind['of'])}"
    return f"*{'const' if kind['const'] else 'mut'} {type_name(kind['to'])}"


def emit(api):
    out = [
        "// SPDX-License-Identifier: Apache-2.0",
        "// Generated from moec.h by generate.py; do not edit.",
        "",
    ]
    out += ["functions! {"]
    for row in api["functions"]:
        args = ", ".join(f"{a['name']}: {type_name(a['type'])}" for a in row["arguments"])
        returns = row["returns"]
        result = "" if returns["kind"] == "void" else f" -> {type_name(returns)}"
        out.append(f"    fn {row['name']}({args}){result};")
    return {"rust/moec-sys/src/raw_dynamic.rs": "\n".join(out + ["}", ""])}
