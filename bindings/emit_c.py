# SPDX-License-Identifier: Apache-2.0
"""api.json -> a C file that compiles only if a C compiler sees what libclang saw.

    python bindings/emit_c.py >layout.c
"""

import json
import pathlib


def emit(api):
    lines = ["#include <moec/moec.h>"]
    for row in api["structs"]:
        name = row["name"]
        lines.append(f'_Static_assert(sizeof({name}) == {row["bytes"]}, "{name}");')
        lines += [
            f'_Static_assert(offsetof({name}, {f["name"]}) == {f["offset"]}, "{name}.{f["name"]}");'
            for f in row["fields"]
        ]
    values = {row["name"]: row["value"] for row in api["constants"]} | api["macros"]
    lines += [f'_Static_assert({name} == {value}, "{name}");' for name, value in values.items()]
    # A table of all functions: each is declared, and the library has it.
    names = [row["name"] for row in api["functions"]]
    lines += ["typedef void (*any_function)(void);", "any_function functions[] = {"]
    lines += [f"  (any_function){name}," for name in names] + ["};"]
    count = len(names)
    lines += ["int main(void) {", f"  for (int i = 0; i < {count}; ++i)"]
    return [*lines, "    if (functions[i] == 0) return 1;", "  return 0;", "}"]


if __name__ == "__main__":
    file = pathlib.Path(__file__).with_name("api.json")
    print("\n".join(emit(json.loads(file.read_text()))))
