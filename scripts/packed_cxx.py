#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""packed_cxx.py ARGUMENTS...: c++ for the library's sources that a package carries, in $PACKED. An
object of build/release takes the place of one that would be the same: the flags are equal; the
source, and every header that it finds, lie in the package and have the bytes of the tree's. What
differs is an error. All else goes to c++."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELEASE = ROOT / "build/release"
# What changes no code: a list of dependencies, a precompiled header, what the crate cc adds. Also
# left out below are warnings and folders.
NEUTRAL = {"-MD", "-MF", "-MT", "-include", "-fdata-sections", "-m64", "-march=x86-64", "-w"}


def flags(command):
    return {word for word in command if word[0] == "-" and word[1] not in "IW"} - NEUTRAL


def main(arguments):
    if "-c" not in arguments or "CMakeFiles/moec_objects.dir" not in " ".join(arguments):
        os.execvp("c++", ["c++", *arguments])
    place = arguments.index("-o")
    name = arguments[place + 1]
    path = RELEASE / name
    listed = json.loads((RELEASE / "compile_commands.json").read_text())
    (known,) = (entry["command"].split() for entry in listed if entry["output"] == str(path))
    other = flags(arguments) ^ flags(known)
    assert not other, f"{path} was compiled with other flags: {sorted(other)}"

    without_output = arguments[:place] + arguments[place + 2:]
    subprocess.run(["c++", *("-MM" if word == "-MD" else word for word in without_output)],
                   check=True)
    files = Path(arguments[arguments.index("-MF") + 1]).read_text().replace("\\\n", " ")
    packed, generated = Path(os.environ["PACKED"]), Path("generated").resolve()
    for file in map(Path, files.split(": ", 1)[1].split()):
        own = (RELEASE / "generated" / file.relative_to(generated)
               if file.is_relative_to(generated) else ROOT / file.relative_to(packed))
        assert file.read_bytes() == own.read_bytes(), f"{file} is not {own}"
    Path(name).write_bytes(path.read_bytes())


if __name__ == "__main__":
    main(sys.argv[1:])
