# SPDX-License-Identifier: Apache-2.0
"""moec.h compiles alone and twice, in every C and C++ that a user may have, without a warning.
Each of its functions has a text of its own, and each enumerator stands where a reader looks."""

import re
import shutil
import subprocess

import pytest

STANDARDS = ["c99", "c11", "c17", "c++11", "c++17", "c++20"]
FLAGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wpadded", "-Werror", "-fsyntax-only"]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("standard", STANDARDS)
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_compiles(header, compiler, standard, times):
    assert shutil.which(compiler), f"{compiler} is not installed"
    language = "c++" if "+" in standard else "c"
    command = [compiler, "-x", language, f"-std={standard}", *FLAGS, f"-I{header.parents[1]}", "-"]
    source = "#include <moec/moec.h>\n" * times + "int used;\n"
    run = subprocess.run(command, input=source, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_a_padded_struct_would_be_refused(tmp_path):
    (tmp_path / "padded.h").write_text("struct a { char b; int c; };\n")
    run = subprocess.run(["gcc", "-x", "c", *FLAGS, str(tmp_path / "padded.h")])
    assert run.returncode != 0


def without_text(text):
    """Functions of a header whose declaration no comment stands before."""
    before = re.compile(r"(\*/\n)?^MOEC_API [^;]*?\b(moec_\w+)\(", re.MULTILINE)
    return [m[2] for m in before.finditer(text) if not m[1]]


def test_each_function_has_a_text_of_its_own(header):
    text = header.read_text()
    assert text.count("\nMOEC_API ") > 70
    assert without_text(text) == []
    assert without_text(text.replace("/* Drops the caller's reference. */\n", "", 1)) == [
        "moec_router_free"]


def test_enumerators_are_indented_by_two(header):
    lines = header.read_text().splitlines()
    odd = [line for line in lines if re.match(r"\s+MOEC_\w+ = -?\w+", line)
           and not re.match(r"  \S", line)]
    assert odd == []
