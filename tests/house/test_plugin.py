# SPDX-License-Identifier: Apache-2.0
"""How the library finds its CUDA plug-in, what it says of one that is not its own, and what the
plug-in says of this machine: a driver and a cuBLASLt that are made here stand for all others.

Each question is asked in a process of its own, because a plug-in is never unloaded. Shown to fail:
with a RUNPATH of the build tree, which ends in an empty entry, the planted driver is opened.
"""

import functools
import json
import shutil
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
# A driver that starts with an error, or serves an older CUDA.
DRIVER = """
#include <string.h>
int cuDriverGetVersion(int* version) {{ *version = {version}; return 0; }}
int cuInit(unsigned flags) {{ (void)flags; return {init}; }}
int cuGetProcAddress_v2(const char* name, void** function, int version, unsigned long long flags,
                        int* status) {{
  (void)version, (void)flags, (void)status;
  *function = !strcmp(name, "cuInit") ? (void*)cuInit
            : !strcmp(name, "cuDriverGetVersion") ? (void*)cuDriverGetVersion
            : !strcmp(name, "cuGetProcAddress") ? (void*)cuGetProcAddress_v2 : 0;
  return *function ? 0 : 500;
}}
"""
CUBLASLT = ("Create", "MatmulAlgoGetHeuristic", "Matmul", "MatmulDescInit_internal",
            "MatmulDescSetAttribute", "MatrixLayoutInit_internal", "MatmulPreferenceInit_internal",
            "MatmulPreferenceSetAttribute", "GetVersion")
FAKE = """
#include "backend/backend.h"
#include "core/build_id.h"
static const moec::BackendEntry entry = {{moec::kBackendInterface + {interface}, {build_id},
                                          MOEC_CUDA, [] {{ return 3; }}, nullptr, nullptr, nullptr,
                                          nullptr}};
extern "C" const moec::BackendEntry* {name}() {{ return &entry; }}
"""


def ask(library, question, cwd=None, **environment):
    """Run Python statements that print, with `moec` loaded; what they print."""
    code = ASK + textwrap.dedent(question)
    run = subprocess.run([sys.executable, "-c", code, str(library)], capture_output=True, text=True,
                         env=environment, cwd=cwd)
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


def describe(library, **more):
    question = f"""
        need = ctypes.c_uint64()
        assert moec.moec_backend_describe({CUDA}, None, ctypes.c_uint64(0), ctypes.byref(need)) == 0
        text = ctypes.create_string_buffer(need.value)
        assert moec.moec_backend_describe({CUDA}, text, need, ctypes.byref(need)) == 0
        print(text.value.decode())"""
    return json.loads(ask(library, question, **more))


def failing_context(library, **environment):
    question = f"""
        class Desc(ctypes.Structure):
            _fields_ = [("struct_size", ctypes.c_uint32), ("flags", ctypes.c_uint32),
                        ("device_type", ctypes.c_int32), ("rest", ctypes.c_char * 36)]
        desc, out = Desc(ctypes.sizeof(Desc), 0, {CUDA}), ctypes.c_void_p()
        print(moec.moec_context_create(ctypes.byref(desc), ctypes.byref(out)), last_message())"""
    return ask(library, question, **environment)


def compile_c(file, source):
    file.parent.mkdir(parents=True, exist_ok=True)
    source_file = file.with_suffix(".c")
    source_file.write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", str(source_file), f"-Wl,-soname,{file.name}", "-o",
                    str(file)], check=True)


@pytest.fixture
def site(build, tmp_path):
    """The library and its real plug-in as a wheel installs them."""
    lib = tmp_path / "site" / "moec" / "lib"
    lib.mkdir(parents=True)
    for name in ("libmoec.so.0", "libmoec_cuda.so.0"):
        if not (build / "lib" / name).exists():
            pytest.skip("built without CUDA")
        shutil.copy(build / "lib" / name, lib)
    return lib / "libmoec.so.0"


@pytest.fixture(scope="session")
def compiled(root, build, tmp_path_factory):
    """A plug-in of three devices, which is compiled once."""
    @functools.cache
    def library(**variant):
        folder = tmp_path_factory.mktemp("fake")
        (folder / "fake.cpp").write_text(FAKE.format(**variant))
        folders = [root / "src", root / "capi" / "include", build / "generated"]
        subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", *(f"-I{f}" for f in folders),
                        "fake.cpp", "-o", "fake.so"], check=True, cwd=folder)
        return folder / "fake.so"
    return library


@pytest.fixture
def fake(compiled, tmp_path):
    def copied(interface=0, build_id="moec::kBuildId", name="moec_backend_entry"):
        library = compiled(interface=interface, build_id=build_id, name=name)
        return Path(shutil.copy(library, tmp_path / "libmoec_cuda.so.0"))
    return copied


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


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a driver")
def test_no_driver_is_told(site):
    found = describe(site)
    assert found["state"] == "no_driver" and found["devices"] == 0 and found["driver"] == ""
    assert "no NVIDIA driver is installed" in found["why"] and "driver 580" in found["why"]
    assert found["plugin"] == str(site.with_name("libmoec_cuda.so.0"))
    assert failing_context(site).startswith("-11 moec_context_create: no CUDA device: libcuda.so.1")


@pytest.mark.parametrize(("version", "init", "state", "parts"), [
    (12080, 0, "old_driver", ["serves CUDA up to 12.8", "built for CUDA 13.", "driver 580"]),
    (13000, 100, "no_device", ["shows no GPU"]),
    (13000, 803, "failed", ["cudaErrorSystemDriverMismatch"]),
])
def test_what_a_driver_lacks_is_told(site, tmp_path, version, init, state, parts):
    compile_c(tmp_path / "driver" / "libcuda.so.1", DRIVER.format(version=version, init=init))
    driver = {"LD_LIBRARY_PATH": str(tmp_path / "driver")}
    found = describe(site, **driver)
    assert found["state"] == state and found["devices"] == 0
    assert found["driver"] == f"{version // 1000}.{version % 1000 // 10}"
    error = failing_context(site, **driver)
    for part in parts:
        assert part in found["why"] and part in error
    hidden = describe(site, CUDA_VISIBLE_DEVICES="", **driver)["why"]
    assert ("CUDA_VISIBLE_DEVICES is empty" in hidden) == (state == "no_device")


def test_the_current_folder_brings_no_library(site, tmp_path):
    """RUNPATH has no empty entry: what lies where a program was started is not opened."""
    planted = tmp_path / "planted"
    for name in ("libcuda.so.1", "libcublasLt.so.13"):
        compile_c(planted / name, f"""
            #include <stdio.h>
            __attribute__((constructor)) static void run(void) {{
              fclose(fopen("{planted}/{name}.ran", "w"));
            }}""")
    describe(site, cwd=planted)
    assert not list(planted.glob("*.ran"))


def test_cublaslt_of_the_python_package_is_found(site, tmp_path):
    """nvidia-cublas in the same site-packages, without any variable."""
    if "libcublasLt" not in (without := describe(site)["dense_products"]):
        pytest.skip("this machine has a cuBLASLt of its own")
    assert without.startswith("kernels of moec")
    library = tmp_path / "site" / "nvidia" / "cu13" / "lib" / "libcublasLt.so.13"
    compile_c(library, "\n".join(f"unsigned long cublasLt{name}(void) {{ return 130100; }}"
                                 for name in CUBLASLT))
    assert describe(site)["dense_products"] == f"cuBLASLt 130100 of {library}"
    compile_c(library, "int cublasLtCreate;")
    assert "has no cublasLt" in describe(site)["dense_products"]
