# SPDX-License-Identifier: Apache-2.0
"""How the library finds its CUDA plug-in, and what it says of one that is not its own.

Each question is asked in a process of its own, because a plug-in is never unloaded.
"""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

CUDA = 2
ASK = """
import ctypes, sys
class Info(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint32), ("flags", ctypes.c_uint32),
                ("code", ctypes.c_int32), ("native_code", ctypes.c_int32),
                ("arg_index", ctypes.c_int32), ("reserved0", ctypes.c_uint32),
                ("site", ctypes.c_char * 64), ("message", ctypes.c_char * 512)]
moec = ctypes.CDLL(sys.argv[1])
def last_message():
    info = Info(struct_size=ctypes.sizeof(Info))
    moec.moec_last_error(ctypes.byref(info))
    return info.message.decode()
"""
FAKE = """
#include "backend/backend.h"
#include "core/build_id.h"
static const moec::BackendEntry entry = {{moec::kBackendInterface + {interface}, {build_id},
                                          MOEC_CUDA, [] {{ return 3; }}, nullptr, nullptr}};
extern "C" const moec::BackendEntry* {name}() {{ return &entry; }}
"""


def ask(library, question, **environment):
    """Run Python statements that print, with `moec` loaded; what they print."""
    code = ASK + textwrap.dedent(question)
    run = subprocess.run([sys.executable, "-c", code, str(library)], capture_output=True, text=True,
                         env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def count_devices(library, **environment):
    question = f"""
        count = ctypes.c_int32(-1)
        status = moec.moec_device_count({CUDA}, ctypes.byref(count))
        print(status, count.value)"""
    return ask(library, question, **environment)


def load(library, path):
    return ask(library, f'print(moec.moec_backend_load(b"{path}"), last_message())')


@pytest.fixture
def fake(root, build, tmp_path):
    """Compile a plug-in of three devices."""
    def compiled(file="libmoec_cuda.so.0", interface=0, build_id="moec::kBuildId",
                 name="moec_backend_entry"):
        source, library = tmp_path / "fake.cpp", tmp_path / file
        source.write_text(FAKE.format(interface=interface, build_id=build_id, name=name))
        folders = [root / "src", root / "capi" / "include", build / "generated"]
        subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", *(f"-I{f}" for f in folders),
                        str(source), "-o", str(library)], check=True)
        return library
    return compiled


@pytest.fixture
def library(build):
    return build / "lib" / "libmoec.so.0"


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a driver")
def test_no_driver_means_no_device_and_no_error(library):
    assert count_devices(library) == "0 0"


def test_the_own_plugin_loads(library, build):
    plugin = build / "lib" / "libmoec_cuda.so.0"
    if not plugin.exists():
        pytest.skip("built without CUDA")
    assert load(library, plugin) == "0"


def test_found_by_environment_before_the_library_folder(library, fake):
    assert count_devices(library, MOEC_BACKEND_PATH=str(fake().parent)) == "0 3"
    assert count_devices(library, MOEC_BACKEND_PATH=f"/nowhere:{fake()}") == "0 3"


def test_found_beside_the_library(library, fake, tmp_path):
    beside = tmp_path / "libmoec.so.0"
    beside.write_bytes(library.read_bytes())
    fake()
    assert count_devices(beside) == "0 3"


def test_a_program_with_the_library_inside_looks_beside_itself(root, build, fake, tmp_path):
    """And not in the current folder, which is where its name, as called, seems to lie."""
    source, program = tmp_path / "count.c", tmp_path / "bin" / "count"
    source.write_text("""#include <moec/moec.h>
        #include <stdio.h>
        int main(void) {
          int32_t count = -1;
          const int status = moec_device_count(MOEC_CUDA, &count);
          printf("%d %d", status, count);
          return 0;
        }""")
    program.parent.mkdir()
    subprocess.run(["gcc", f"-I{root}/capi/include", str(source), str(build / "lib/libmoec.a"),
                    "-lstdc++", "-lm", "-lpthread", "-ldl", "-o", str(program)], check=True)

    def count():
        return subprocess.run(["count"], executable=program, cwd=tmp_path, check=True,
                              capture_output=True, text=True).stdout

    plugin = fake()  # in the current folder
    assert count() != "0 3"
    plugin.rename(program.parent / plugin.name)
    assert count() == "0 3"


def test_another_build_is_refused(library, fake):
    answer = load(library, fake(build_id='"0.0.0-other"'))
    assert answer.startswith("-12 ") and "0.0.0-other; expected 0.1.0-" in answer


def test_another_interface_is_refused(library, fake):
    assert "has interface 2; expected 1" in load(library, fake(interface=1))


def test_a_library_that_is_no_plugin_is_refused(library, fake):
    answer = load(library, fake(name="something_else"))
    assert answer.startswith("-12 ") and "exports no moec_backend_entry" in answer


def test_a_refused_plugin_in_the_search_is_no_device(library, fake):
    folder = fake(build_id='"0.0.0-other"').parent
    assert count_devices(library, MOEC_BACKEND_PATH=str(folder)) in ("0 0", "0 1", "0 2", "0 8")


def test_an_absent_file_is_named(library):
    answer = load(library, "/nowhere/libmoec_cuda.so.0")
    assert answer.startswith("-11 ") and "/nowhere/libmoec_cuda.so.0" in answer
