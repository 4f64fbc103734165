# SPDX-License-Identifier: Apache-2.0
"""An installed moec is found by pkg-config and by CMake, from wherever its prefix was moved to, and
the C program of the README runs against it. What is shipped looks for libraries beside itself only
(scripts/check_shipped.py, which every wheel passes, too); shown to fail: planted entries."""

import glob
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import readme_c

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import check_shipped  # noqa: E402

CONSUMER = """
cmake_minimum_required(VERSION 3.18)
project(consumer LANGUAGES C)
find_package(moec 0.1 CONFIG REQUIRED)
add_executable(program program.c)
target_link_libraries(program PRIVATE moec::{target})
"""


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def prefix(build, tmp_path_factory):
    """The build installed, then moved: nothing in it may name the place it was installed to."""
    first = tmp_path_factory.mktemp("install") / "first"
    run("cmake", "--install", build, "--prefix", first)
    moved = first.parent / "moved"
    first.rename(moved)
    return moved


@pytest.fixture(scope="module")
def program(root, tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "program.c"
    path.write_text(readme_c.programs()[0])
    return path


def libdir(prefix):
    return next(prefix.rglob("libmoec.so.0")).parent


def compile_and_run(prefix, program, static):
    flags = ["--static"] if static else []
    query = ["pkg-config", *flags, "--cflags", "--libs", "moec"]
    path = {"PKG_CONFIG_PATH": str(next(prefix.rglob("moec.pc")).parent), "PATH": "/usr/bin:/bin"}
    arguments = run(*query, env=path).split()
    binary = program.with_name("static" if static else "shared")
    run("cc", "-std=c11", "-Wall", "-Wextra", "-Werror", program, "-o", binary, *arguments)
    shared = {} if static else {"LD_LIBRARY_PATH": str(libdir(prefix))}
    return run(binary, env=shared)


def test_readme_program_runs_with_the_shared_library(prefix, program):
    assert compile_and_run(prefix, program, static=False)


def test_readme_program_for_a_gpu_runs_on_the_cpu(prefix, root, tmp_path):
    path = tmp_path / "gpu.c"
    path.write_text(readme_c.programs()[1].replace("MOEC_CUDA", "MOEC_CPU"))
    assert compile_and_run(prefix, path, static=False) == "MOEC_OK\n"


def test_readme_program_runs_with_the_static_library(prefix, program, tmp_path):
    only_static = tmp_path / "only_static"
    shutil.copytree(prefix, only_static, symlinks=True,
                    ignore=shutil.ignore_patterns("libmoec*.so*"))
    assert compile_and_run(only_static, program, static=True)


@pytest.mark.parametrize("target", ["moec", "static"])
def test_cmake_package(prefix, program, tmp_path, target):
    (tmp_path / "CMakeLists.txt").write_text(CONSUMER.format(target=target))
    shutil.copy(program, tmp_path / "program.c")
    run("cmake", "-S", tmp_path, "-B", tmp_path / "b", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path / "b")
    assert run(tmp_path / "b" / "program")


def test_soname_and_links(prefix):
    directory = libdir(prefix)
    assert (directory / "libmoec.so").resolve().name == "libmoec.so.0.1.0"
    dynamic = run("readelf", "-d", directory / "libmoec.so")
    assert "soname: [libmoec.so.0]" in dynamic
    assert "cuda" not in dynamic


def test_installed_files_look_for_libraries_beside_themselves(prefix):
    assert list(check_shipped.faults(prefix)) == []


@pytest.mark.parametrize("entries", ["/opt/lib", "$ORIGIN/l:", ":$ORIGIN", "lib", "$ORIGINAL/lib"])
@pytest.mark.parametrize("tags", ["enable", "disable"])
def test_a_planted_entry_is_seen(tmp_path, entries, tags):
    library = tmp_path / "lib" / "libplanted.so.0"
    library.parent.mkdir()
    (tmp_path / "planted.c").write_text("int planted;")
    link = ["gcc", "-shared", tmp_path / "planted.c", "-o", library, f"-Wl,--{tags}-new-dtags"]
    run(*link, "-Wl,-rpath,$ORIGIN:$ORIGIN/../lib")
    assert list(check_shipped.faults(tmp_path)) == []
    run(*link, f"-Wl,-rpath,{entries}")
    found = list(check_shipped.faults(tmp_path))
    assert len(found) == 1 and f"{'RUN' if tags == 'enable' else 'R'}PATH '{entries}'" in found[0]
    with zipfile.ZipFile(tmp_path / "planted.whl", "w") as wheel:
        wheel.write(library, "planted/lib/libplanted.so.0")
    assert check_shipped.main([tmp_path / "planted.whl"]) == 1


def test_nothing_installed_names_the_build(prefix, build):
    for path in prefix.rglob("*"):
        if path.suffix in (".pc", ".cmake"):
            assert str(build) not in path.read_text(), path


def test_uv_builds_again_when_a_source_has_changed(root):
    """By itself uv looks into the folder of the package alone, and keeps what it built before."""
    python = root / "bindings/python"
    keys = tomllib.loads((python / "pyproject.toml").read_text())["tool"]["uv"]["cache-keys"]
    seen = set()
    for key in keys:
        before, _, rest = key["file"].partition("{")
        names, _, after = rest.partition("}")
        for pattern in (f"{before}{name}{after}" for name in names.split(",")):
            seen |= {(python / found).resolve()
                     for found in glob.glob(pattern, root_dir=python, recursive=True)}
    read = {root / "CMakeLists.txt", root / "bench/shapes.json"}
    for folder in ("src", "capi", "cmake", "bindings/python"):
        read |= {path for path in (root / folder).rglob("*") if path.is_file()
                 and path.suffix not in (".md", ".pyc")}
    unread = {python / "tests", python / "framework_tests"}
    assert sorted(path for path in read - seen if not unread & set(path.parents)) == []


def test_clean_keeps_only_downloads(root, tmp_path):
    downloads = {"venv", "docs-venv", "cuda", "zig", "julia", "go-toolchain", "aarch64-python"}
    built = {"release", "aarch64", "asan", "tsan", "python", "wheel", "py-test-venv", "demo"}
    for name in downloads | built:
        (tmp_path / "build" / name).mkdir(parents=True)
    run("make", "-f", root / "Makefile", "clean", cwd=tmp_path)
    assert {path.name for path in (tmp_path / "build").iterdir()} == downloads
