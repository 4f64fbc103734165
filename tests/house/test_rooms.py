# SPDX-License-Identifier: Apache-2.0
"""check_rooms.py sees a planted breach of each kind, and passes a clean file of each room."""

import re
import subprocess
from pathlib import Path

import check_rooms
import pytest

HOUSE = Path(__file__).parent
SPDX = "// SPDX-License-Identifier: Apache-2.0\n"
NEIGHBOURS = [  # files that the planted includes name
    "src/core/error.h", "src/layer/plan.h", "src/math/router.h", "src/quant/format.h",
    "src/backend/args.h", "src/backend/cpu/gemm.h", "src/backend/cuda/device/launch.cuh",
    "src/backend/cuda/rows/combine.h",
    "tests/support/random.h", "tests/oracle/moe_oracle.h", check_rooms.HEADER,
]
BREACHES = [  # file, its text after the SPDX line, a part of what is reported
    ("src/core/a.h", '#include "layer/plan.h"', "may not include src/layer/plan.h"),
    ("src/math/a.h", '#include "backend/args.h"', "may not include src/backend/args.h"),
    ("src/quant/a.h", '#include "math/router.h"', "may not include src/math/router.h"),
    ("src/layer/a.cpp", '#include "backend/cpu/gemm.h"', "may not include src/backend/cpu"),
    ("src/backend/a.cpp", '#include "backend/cpu/gemm.h"', "may not include src/backend/cpu"),
    ("src/backend/cpu/a.cpp", '#include "backend/cuda/device/launch.cuh"', "may not include"),
    ("src/backend/cpu/a.cpp", '#include "layer/plan.h"', "may not include src/layer"),
    ("src/backend/cuda/a.cu", '#include "backend/cpu/gemm.h"', "may not include"),
    ("src/backend/cuda/plan/a.cu", '#include "backend/cuda/rows/combine.h"', "may not include"),
    ("src/backend/cuda/device/a.cu", '#include "backend/cuda/rows/combine.h"', "may not include"),
    ("capi/a.cpp", '#include "backend/args.h"', "may not include src/backend/args.h"),
    ("bench/a.cpp", '#include "core/error.h"', "may not include src/core/error.h"),
    ("tests/layer/a.cpp", '#include "core/error.h"', "may not include src/core/error.h"),
    ("bindings/python/a.i", '%include "core/error.h"', "may not include src/core/error.h"),
    ("tests/oracle/a.cpp", "#include <moec/moec.h>", "may not include"),
    ("tests/oracle/a.cpp", '#include "support/random.h"', "may not include tests/support"),
    ("tests/oracle/a.cpp", "#include <gtest/gtest.h>", "only the standard library"),
    ("src/layer/a.cpp", "#include <cuda_runtime.h>", "CUDA header"),
    ("src/core/a.h", "int a;\n" * 399, "401 lines; split it"),
    ("src/core/a.h", "int " + "a" * 100 + ";", "105 columns"),
    ("src/core/a.h", "// caf\u00e9", "not ASCII"),
    ("src/core/a.h", 'auto a = "/ho' 'me/me/file";', "a path of somebody's machine"),
    (check_rooms.HEADER, "int moec_f(int function);", "`function` is a keyword"),
    (check_rooms.HEADER, "struct a { int select; };", "`select` is a keyword"),
]
CLEAN = [
    ("src/layer/a.cpp", '#include "backend/args.h"\n#include "core/error.h"'),
    ("src/backend/cpu/a.cpp", '#include "backend/cpu/gemm.h"\n#include "math/router.h"'),
    ("src/backend/cuda/a.cu", "#include <cuda_runtime.h>"),
    ("tests/unit/a.cpp", '#include "core/error.h"\n#include "oracle/moe_oracle.h"'),
    ("tests/oracle/a.cpp", '#include "moe_oracle.h"\n#include <vector>'),
    ("src/core/a.h", "#include <moec/moec.h>"),
    (check_rooms.HEADER, "/* for while */ int moec_f(const void *text, char a, double b);"),
]


@pytest.fixture
def plant(tmp_path):
    def planted(path, text):
        for name in [*NEIGHBOURS, path]:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(SPDX)
        (tmp_path / path).write_text(f"{SPDX}{text}\n")
        return list(check_rooms.breaches(tmp_path, path))
    return planted


@pytest.mark.parametrize("path, text, reported", BREACHES)
def test_a_planted_breach_is_reported(plant, path, text, reported):
    found = plant(path, text)
    assert len(found) == 1 and reported in found[0]


@pytest.mark.parametrize("path, text", CLEAN)
def test_a_clean_file_passes(plant, path, text):
    assert plant(path, text) == []


def test_a_missing_license_line_is_reported(tmp_path):
    (tmp_path / "a.h").write_text("int a;\n")
    assert "no SPDX" in next(check_rooms.breaches(tmp_path, "a.h"))


def test_a_source_archive_is_looked_at(tmp_path, monkeypatch):
    archive = tmp_path / "archive"
    for name in ["src/a.h", "build/b.h", "target/c.h"]:
        (archive / name).parent.mkdir(parents=True)
        (archive / name).write_text("int a;\n")
    (archive / ".gitignore").write_text("/build/\ntarget/\n")
    assert check_rooms.source_files(archive) == ["src/a.h"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("/archive/\n")
    assert check_rooms.source_files(archive) == ["src/a.h"]
    (archive / "src/a.h").unlink()
    monkeypatch.setattr("sys.argv", ["check_rooms.py", str(archive)])
    with pytest.raises(SystemExit, match="no sources were found"):
        check_rooms.main()


def test_every_test_of_the_house_is_listed():
    listed = (HOUSE.parent / "CMakeLists.txt").read_text()
    names = re.search(r"foreach\(name ([^)]*)\)\n  add_test\(NAME house/", listed)[1].split()
    assert sorted(names) == sorted(p.stem.removeprefix("test_") for p in HOUSE.glob("test_*.py"))
