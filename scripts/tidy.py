#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tidy.py CLANG_TIDY BUILD UNIT FILES...: clang-tidy on FILES of one room as one compilation, UNIT,
with the flags that BUILD compiles them with. Two thirds of the time of a file are headers that it
shares with the others. UNIT is the text of all: of an included file the analyser would walk no
function. Messages name the file that a line comes from. UNIT.d lists what UNIT includes; UNIT.stamp
is new where nothing was found.

misc-unused-using-decls takes a name for used that another file uses; so that is asked here again.
Shown planted faults of 25 checks: what it says is what it says file by file.
"""

import bisect
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def flags_of(build, files):
    """The one list of flags that all files have."""
    listed = json.loads((build / "compile_commands.json").read_text())
    found = {}
    for entry in listed:
        if entry["file"] in files and "/moec_objects.dir/" in entry["output"]:
            words = entry["command"].split()
            words = words[1:words.index("-o")]
            found[entry["file"]] = words
    assert set(found) == set(files), set(files) ^ set(found)
    assert all(words == found[files[0]] for words in found.values()), "files with several flags"
    return found[files[0]]


def unused(path):
    """Names that a file declares to use and does not."""
    text = re.sub(r"//[^\n]*", "", Path(path).read_text())
    for name in re.findall(r"^\s*using [\w:]+::(\w+);", text, re.M):
        if len(re.findall(rf"\b{name}\b", text)) < 2:
            yield f"{path}: error: using decl '{name}' is unused [misc-unused-using-decls]"


def main(tidy, build, unit, *files):
    build, unit = Path(build), Path(unit)
    begins, text = [], ""
    for file in files:
        begins.append(text.count("\n") + 1)
        text += Path(file).read_text()
    unit.parent.mkdir(parents=True, exist_ok=True)
    unit.write_text(text)
    folders = sorted({str(Path(file).parent) for file in files})
    flags = flags_of(build, files) + [f"-iquote{folder}" for folder in folders]
    subprocess.run(["c++", *flags, "-MM", "-MT", f"{unit}.stamp", "-MF", f"{unit}.d", unit],
                   check=True)

    cache = unit.parent
    modules = ["-fmodules", "-fmodules-validate-system-headers", f"-fmodules-cache-path={cache}",
               f"-fmodule-map-file={cache}/precompiled.modulemap"]
    run = subprocess.run(
        [tidy, "--quiet", f"--config-file={ROOT}/.clang-tidy",
         *(f"--extra-arg={flag}" for flag in modules), unit, "--", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def origin(match):
        line = int(match[1])
        at = bisect.bisect(begins, line) - 1
        return f"{files[at]}:{line - begins[at] + 1}:"

    wrong = [line for file in files for line in unused(file)]
    if run.returncode or wrong:
        said = re.sub(rf"{re.escape(str(unit))}:(\d+):", origin, run.stdout + run.stderr)
        print(said, *wrong, sep="\n")
        return 1
    Path(f"{unit}.stamp").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
