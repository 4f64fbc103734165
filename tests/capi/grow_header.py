# SPDX-License-Identifier: Apache-2.0
"""moec.h -> the header of a later release: every sized struct has one more field at its tail.

    python grow_header.py moec.h grown/moec.h
"""

import re
import sys
from pathlib import Path

STRUCT = re.compile(r"typedef struct (moec_\w+) \{[^}]*?\buint32_t struct_size\b[^}]*?(\} \1;)")


def grown(text):
    count = 0

    def add_field(match):
        nonlocal count
        count += 1
        return match[0].removesuffix(match[2]) + "  uint64_t test_growth;\n" + match[2]

    text = STRUCT.sub(add_field, text)
    if count < 20:
        sys.exit(f"grow_header: found {count} sized structs; expected more than 20")
    return text.replace("#define MOEC_H\n", "#define MOEC_H\n#define MOEC_TEST_GROWTH 1\n", 1)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(grown(source.read_text()))
