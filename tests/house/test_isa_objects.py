# SPDX-License-Identifier: Apache-2.0
"""Objects compiled for one instruction set define nothing that other objects may end up using.

An inline function of a header, compiled with AVX-512 in one object, is a weak symbol; the linker
keeps one copy of it for the whole library, and a machine without AVX-512 would die in it. Shown
once to fail with an inline function, its address taken, in tile_avx512.cpp.
"""

import json
import re
import subprocess

import pytest


def isa_objects(build):
    """Objects of the library whose compile command names an instruction set."""
    for entry in json.loads((build / "compile_commands.json").read_text()):
        if re.search(r" -m(avx|fma|f16c|amx|sse4|bmi|arch=)", entry["command"]):
            path = build / re.search(r" -o (\S+)", entry["command"]).group(1)
            if path.exists():  # of another processor not all is built
                yield path


def weak_symbols(path, nm):
    command = [nm, "-C", "--defined-only", str(path)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.split(None, 2)[2] for line in listing.splitlines() if " W " in line]


def test_no_weak_symbols(build):
    objects = list(isa_objects(build))
    if not objects:
        pytest.fail("no object is compiled for an instruction set")
    nm = re.search(r"^CMAKE_NM:FILEPATH=(.+)$", (build / "CMakeCache.txt").read_text(), re.M)[1]
    assert {path.name: weak for path in objects if (weak := weak_symbols(path, nm))} == {}
