# SPDX-License-Identifier: Apache-2.0
"""moec.h compiles alone and twice, in every C and C++ that a user may have, without a warning."""

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
