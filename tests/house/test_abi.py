# SPDX-License-Identifier: Apache-2.0
"""Today's header and library keep the ABI; each kind of break is reported when it is planted."""

import subprocess
import sys
from pathlib import Path

import abi
import pytest

GENERATE = Path(__file__).resolve().parents[2] / "bindings/generate.py"

BREAKS = [  # what to replace in moec.h, by what, a part of what is reported
    ("MOEC_E_SHAPE = -4", "MOEC_E_SHAPE = -40", "renumbered"),
    ("MOEC_E_SHAPE = -4, ", "", "MOEC_E_SHAPE was removed"),
    ("#define MOEC_MAX_DIMS 6", "#define MOEC_MAX_DIMS 8", "layout moved"),
    ("int32_t arg_index;", "int32_t other_index;", "layout moved"),
    ("uint64_t calls, kernel_launches;", "uint64_t kernel_launches, calls;", "layout moved"),
    ("  int32_t top_k;", "  int64_t inserted;\n  int32_t top_k;", "layout moved"),
    ("uint64_t base, per_token;", "uint64_t base, per_token, more;", "frozen"),
    ("typedef int32_t moec_status;", "typedef int64_t moec_status;", "moec_status was int"),
    ("moec_abi_version(void)", "moec_abi_version(int32_t a)", "signature"),
    ("uint32_t moec_version(void)", "uint64_t moec_version(void)", "signature"),
    ("MOEC_API uint32_t moec_version(void);", "", "moec_version was removed"),
    ("uint32_t moec_version(void)", "uint32_t moec_renamed(void)", "in symbols.txt but not in"),
    # rules of the header by itself
    ("uint32_t moec_version(void);", "uint32_t moec_version();", "write (void)"),
    ("moec_abi_version(void)", "moec_abi_version(moec_tensor a)", "a struct by value"),
    ("moec_abi_version(void)", "moec_abi_version(long a)", "long"),
    ("moec_abi_version(void)", "moec_abi_version(enum moec_math_mode a)", "an enum type"),
    ("moec_tensor;", "moec_tensor;\ntypedef struct moec_in { uint32_t struct_size, a; } moec_in;\n"
     "typedef struct moec_out { moec_in inner; } moec_out;", "by value; hold a pointer"),
    ("  uint64_t base, per_token;", "  uint64_t base : 4, per_token;", "a bit field"),
]
GROWTH = [
    ("MOEC_E_SHAPE = -4,", "MOEC_E_SHAPE = -4, MOEC_E_NEW = -50,"),
    ("} moec_stats;", "  uint64_t appended;\n} moec_stats;"),
    ("typedef struct moec_context moec_context;",
     "typedef struct moec_context moec_context;\ntypedef struct moec_new moec_new;"),
]


@pytest.fixture
def mutated(header, tmp_path):
    def mutate(old, new):
        text = header.read_text()
        assert old in text, f"moec.h no longer has: {old}"
        changed = tmp_path / "moec.h"
        changed.write_text(text.replace(old, new, 1))
        return list(abi.check(changed))
    return mutate


def test_header_keeps_its_promise(header):
    assert list(abi.check(header)) == []


def test_library_exports_exactly_the_functions_of_the_header(header, build):
    assert list(abi.check(header, build / "lib" / "libmoec.so")) == []


def test_plugin_exports_one_function(build):
    plugin = build / "lib" / "libmoec_cuda.so.0"
    if not plugin.exists():
        pytest.skip("built without CUDA")
    assert abi.exports(plugin) == ["moec_backend_entry"]


def test_what_is_generated_from_the_header_is_todays():
    """The fuzzer's table and the bindings come from bindings/api.json. Shown to fail when a field
    was added to moec.h alone."""
    run = subprocess.run([sys.executable, GENERATE, "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("old, new, reported", BREAKS)
def test_a_planted_break_is_reported(mutated, old, new, reported):
    assert any(reported in line for line in mutated(old, new))


@pytest.mark.parametrize("old, new", GROWTH)
def test_growth_is_allowed(mutated, old, new):
    assert mutated(old, new) == []


def test_a_new_function_needs_only_its_symbol(mutated):
    found = mutated("moec_version(void);", "moec_version(void);\nMOEC_API int32_t moec_new(void);")
    assert found == ["moec_new is in moec.h but not in symbols.txt"]
