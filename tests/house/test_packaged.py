# SPDX-License-Identifier: Apache-2.0
"""What packages carry is of one build: packaged.sh and go_library.sh on folders as an older
configuration left them, with a cmake and a zig that do nothing."""

import os
import shutil
import subprocess

import pytest

SCRIPTS = ("lib.sh", "packaged.sh", "go_library.sh")
LIBRARIES = ("libmoec.so.0", "libmoec_cuda.so.0")


@pytest.fixture
def tree(root, tmp_path):
    """A checkout whose two build folders hold both libraries, one of them without CUDA now."""
    for folder in ("scripts", "bin", "bindings/go"):
        (tmp_path / folder).mkdir(parents=True)
    for name in SCRIPTS:
        shutil.copy(root / "scripts" / name, tmp_path / "scripts")
    shutil.copytree(root / "bindings/go/lib", tmp_path / "bindings/go/lib")
    (tmp_path / "LICENSE").touch()
    for name, says in (("scripts/zig.sh", "zig"), ("bin/cmake", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {says}\n")
        (tmp_path / name).chmod(0o755)
    for preset, cuda in (("release", "ON"), ("aarch64", "OFF")):
        packaged = tmp_path / "build" / preset / "lib/packaged"
        packaged.mkdir(parents=True)
        for name in LIBRARIES:
            (packaged / name).write_text(f"{preset} {name}")
        (tmp_path / "build" / preset / "CMakeCache.txt").write_text(
            f"MOEC_CUDA:BOOL={cuda}\nMOEC_ZIG:FILEPATH=zig\n")
    return tmp_path


def test_the_module_of_go_has_no_plugin_of_another_build(tree):
    paths = f"{tree}/bin:{os.environ['PATH']}"
    done = subprocess.run([tree / "scripts/go_library.sh"], env=os.environ | {"PATH": paths},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tree}/build/go_library\n"
    found = {path.relative_to(tree / "build/go_library").as_posix(): path.read_text()
             for path in (tree / "build/go_library").rglob("*.so.0")}
    assert found == {
        "linux_amd64/libmoec.so.0": "release libmoec.so.0",
        "linux_amd64/libmoec_cuda.so.0": "release libmoec_cuda.so.0",
        "linux_arm64/libmoec.so.0": "aarch64 libmoec.so.0",
    }
