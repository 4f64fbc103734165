# SPDX-License-Identifier: Apache-2.0
"""Where cuBLASLt is found: in nvidia-cublas beside moec, or in another folder of packages (`pip
--user`); else one that the process has open already, or that the system's loader finds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moec
from moec import _cublaslt

FUNCTIONS = ("Create", "MatmulAlgoGetHeuristic", "Matmul", "MatmulDescInit_internal",
             "MatmulDescSetAttribute", "MatrixLayoutInit_internal",
             "MatmulPreferenceInit_internal", "MatmulPreferenceSetAttribute", "GetVersion")
ASK = "import moec; print(moec.describe_backend().get('dense_products', ''))"


def ask(*folders: Path, **more: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))} | more
    return subprocess.run([sys.executable, "-c", ASK], env=environment, check=True,
                          capture_output=True, text=True).stdout.strip()


def compile_library(folder: Path, version: int) -> Path:
    """A library with cuBLASLt's names, and another version."""
    folder.mkdir(parents=True)
    source, library = folder / "fake.c", folder / _cublaslt.NAME
    source.write_text("".join(f"unsigned long cublasLt{name}(void) {{ return {version}; }}\n"
                              for name in FUNCTIONS))
    subprocess.run(["gcc", "-shared", "-fPIC", source, f"-Wl,-soname,{_cublaslt.NAME}", "-o",
                    library], check=True)
    return library


@pytest.mark.skipif(_cublaslt.BESIDE.is_file(), reason="nvidia-cublas is installed beside moec")
def test_another_folder_of_packages(tmp_path: Path) -> None:
    if "libcublasLt" not in ask():
        pytest.skip("no plug-in, or a cuBLASLt of the system")
    package = compile_library(tmp_path / "user" / "nvidia" / "cu13" / "lib", 130200)
    assert ask(tmp_path / "user") == f"cuBLASLt 130200 of {package}"
    # One that is open already, such as PyTorch's, stays.
    other = compile_library(tmp_path / "other", 130300)
    assert ask(tmp_path / "user", LD_PRELOAD=str(other)) == f"cuBLASLt 130300 of {other}"


def test_beside_and_of_the_system(tmp_path: Path) -> None:
    """A copy of moec, so that the tests' environment stays as it is."""
    if moec.describe_backend()["state"] == "no_plugin":
        pytest.skip("no plug-in")
    shutil.copytree(Path(moec.__file__).parent, tmp_path / "site" / "moec")
    system = compile_library(tmp_path / "system", 130400)
    said = ask(tmp_path / "site", LD_LIBRARY_PATH=str(system.parent))
    assert said == f"cuBLASLt 130400 of {system}"
    beside = compile_library(tmp_path / "site/nvidia/cu13/lib", 130500)
    said = ask(tmp_path / "site")
    assert said.startswith("cuBLASLt 130500 of ") and Path(said.split()[-1]).samefile(beside)


def test_the_state_is_always_told() -> None:
    found = moec.describe_backend()
    assert found["state"] and isinstance(found["devices"], int)
    assert moec.describe_backend(moec.DeviceType.CPU) == {"state": "ready", "devices": 1}
