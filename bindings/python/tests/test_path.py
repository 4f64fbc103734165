# SPDX-License-Identifier: Apache-2.0
"""`moec path`: programs outside Python use the package's library, without root or a variable."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

import moec
from moec import cli

README = Path(__file__).parents[3] / "README.md"
PROJECT = """
cmake_minimum_required(VERSION 3.18)
project(consumer LANGUAGES C)
find_package(moec {version} CONFIG REQUIRED {components})
add_executable(program program.c)
target_link_libraries(program PRIVATE moec::moec)
"""


def path(*part: str) -> Path:
    return Path(CliRunner().invoke(cli.app, ["path", *part]).output.strip())


def run(*command: object, **environment: str) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True,
                          env=environment or None)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The C program of the README."""
    source = tmp_path / "program.c"
    source.write_text(re.findall(r"```c\n(.*?)```", README.read_text(), re.S)[0])
    return source


def test_places() -> None:
    assert path() == path("library") and path().name == "libmoec.so.0" and path().is_file()
    shipped = {header.name for header in (path("include") / "moec").iterdir()}
    assert shipped == {"moec.h", "mpi.h", "nccl.h"}
    wrong = CliRunner().invoke(cli.app, ["path", "nowhere"])
    assert wrong.exit_code == 2 and "pkgconfig" in wrong.output


@pytest.mark.skipif(not shutil.which("pkg-config"), reason="needs pkg-config")
def test_pkg_config(program: Path, tmp_path: Path) -> None:
    query = {"PKG_CONFIG_PATH": str(path("pkgconfig")), "PATH": "/usr/bin:/bin"}
    assert run("pkg-config", "--modversion", "moec", **query) == moec.version()
    flags = shlex.split(run("pkg-config", "--cflags", "--libs", "moec", **query))
    run("cc", program, *flags, "-o", tmp_path / "a.out")
    assert run(tmp_path / "a.out", PATH="/usr/bin:/bin") == "MOEC_OK"


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs CMake")
def test_cmake(program: Path, tmp_path: Path) -> None:
    version = ".".join(moec.version().split(".")[:2])
    cuda = "cuda" if moec.describe_backend()["state"] != "no_plugin" else ""
    listing = tmp_path / "CMakeLists.txt"
    configure = ("cmake", "-S", tmp_path, "-B", tmp_path / "b", f"-Dmoec_DIR={path('cmake')}")
    listing.write_text(PROJECT.format(version=version, components=f"COMPONENTS {cuda}"))
    run(*configure)
    run("cmake", "--build", tmp_path / "b")
    assert run(tmp_path / "b" / "program", PATH="/usr/bin:/bin") == "MOEC_OK"
    listing.write_text(PROJECT.format(version=version, components="COMPONENTS nothing"))
    with pytest.raises(AssertionError, match="no component nothing"):
        run(*configure)
