#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""page_code.py LANGUAGE FOLDER: the programs of docs/ in one language, each a file in FOLDER.

All blocks of a language on a page are one program, in their order. A block is left out after the
comment `<!-- not run: WHY -->`. A block of text after `<!-- printed -->` is in the file NAME.out:
the program prints it. Prints the names of the programs' files."""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
SUFFIX = {"python": "py", "c": "c", "rust": "rs", "go": "go", "julia": "jl"}
BLOCK = re.compile(r"(<!-- (not run: [^>]+|printed) -->\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.M)


def programs(language):
    """{page: (program, what it prints or "")}"""
    found = {}
    for page in sorted(DOCS.rglob("*.md")):
        program, printed = [], ""
        for _, mark, name, text in BLOCK.findall(page.read_text()):
            if mark == "printed":
                printed += text
            elif name == language and not mark:
                program.append(text)
        if program:
            found[page.relative_to(DOCS).with_suffix("").as_posix()] = "\n".join(program), printed
    return found


def main():
    language, folder = sys.argv[1], Path(sys.argv[2])
    for page, (program, printed) in programs(language).items():
        path = folder / f"{page.replace('/', '_')}.{SUFFIX[language]}"
        path.write_text(program)
        if printed and language == "python":
            path.with_suffix(".out").write_text(printed)
        print(path)


if __name__ == "__main__":
    main()
