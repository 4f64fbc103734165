# SPDX-License-Identifier: Apache-2.0
"""Each file of the library includes what it uses of the standard library, itself or by a header of
ours: no build need compile it without the precompiled header (src/core/precompiled.h) to see that.

Shown to fail: files without an include, and with a name that has no header here, are planted.
"""

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [ROOT / "src", ROOT / "capi" / "include", ROOT / "capi"]
NAMES = {
    "algorithm": "all_of any_of clamp copy copy_n count count_if equal fill fill_n find find_if "
                 "max lower_bound max_element min min_element none_of nth_element ranges replace "
                 "reverse rotate sort stable_sort transform unique upper_bound",
    "array": "array",
    "bit": "bit_cast bit_ceil bit_width countl_zero countr_zero popcount rotl",
    "atomic": "atomic atomic_flag atomic_ref atomic_thread_fence memory_order "
              "memory_order_acq_rel memory_order_acquire memory_order_relaxed "
              "memory_order_release memory_order_seq_cst",
    "chrono": "chrono",
    "cmath": "abs ceil exp floor fma isfinite isinf isnan log nanf pow round sqrt",
    "concepts": "constructible_from",
    "condition_variable": "condition_variable",
    "cstdarg": "va_list",
    "cstddef": "byte max_align_t nullptr_t ptrdiff_t size_t",
    "cstdint": "int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t uintptr_t",
    "cstdio": "FILE fclose fgets fopen fread fwrite snprintf vsnprintf",
    "cstdlib": "abort aligned_alloc atexit free getenv malloc strtod strtol",
    "cstring": "memchr memcmp memcpy memmove memset strchr strcmp strcspn strerror strlen "
               "strncmp strrchr strstr",
    "exception": "current_exception exception exception_ptr",
    "fstream": "ifstream ofstream",
    "functional": "function greater hash less plus",
    "initializer_list": "initializer_list",
    "limits": "numeric_limits",
    "list": "list",
    "map": "map",
    "memory": "addressof align enable_shared_from_this make_shared make_unique shared_ptr "
              "uninitialized_default_construct_n unique_ptr weak_ptr",
    "mutex": "call_once lock_guard mutex once_flag recursive_mutex scoped_lock try_to_lock "
             "unique_lock",
    "new": "align_val_t bad_alloc",
    "numeric": "accumulate gcd iota lcm",
    "optional": "nullopt optional",
    "set": "set",
    "span": "span",
    "stdexcept": "invalid_argument out_of_range runtime_error",
    "string": "getline string to_string",
    "string_view": "string_view",
    "thread": "this_thread thread",
    "tuple": "tie tuple",
    "type_traits": "common_type_t conditional_t decay_t enable_if_t false_type integral_constant "
                   "is_const_v is_same_v remove_const_t remove_cvref_t remove_reference_t "
                   "true_type type_identity_t",
    "unordered_map": "unordered_map",
    "utility": "as_const exchange forward index_sequence integer_sequence make_index_sequence "
               "make_integer_sequence move pair swap",
    "variant": "get get_if holds_alternative monostate variant visit",
    "vector": "vector",
}
HEADERS = {name: {header} for header, names in NAMES.items() for name in names.split()}
HEADERS |= {name: {"array", "iterator", "span", "string", "vector"}
            for name in ("begin", "data", "end", "next", "prev", "size")}
INTEGER = re.compile(r"(?<![\w:])u?int(?:8|16|32|64|ptr)_t\b")
COMMENT = re.compile(r"//[^\n]*")


def own(path, name):
    """A header of ours, of which those that CMake makes are not in the tree."""
    return next((at for folder in (path.parent, *FOLDERS) if (at := folder / name).exists()), None)


@functools.cache
def included(path, text=None):
    """The headers of the standard library that a file includes, by headers of ours, too."""
    text = path.read_text() if text is None else text
    found = set(re.findall(r"^ *# *include <([\w.]+)>", text, re.M))
    for name in re.findall(r'^ *# *include ["<]([\w./]+\.h)[">]', text, re.M):
        if (at := own(path, name)) and at != path:
            found |= included(at)
    return found


def wrong(path, text):
    """Names of the standard library whose header a file does not include."""
    have = included(path, text)
    code = COMMENT.sub("", text)
    for name in sorted(set(re.findall(r"\bstd::(\w+)", code))):
        if not HEADERS.get(name, set()) & have:
            yield f"std::{name}: include <{'> or <'.join(sorted(HEADERS.get(name, ['?'])))}>"
    if INTEGER.search(code) and not have & {"cstdint", "stdint.h"}:
        yield "integers of a size: include <cstdint>"


def test_files_include_what_they_use():
    paths = [p for folder in ("src", "capi") for p in sorted((ROOT / folder).rglob("*"))
             if p.suffix in (".h", ".cpp") and "cuda" not in p.relative_to(ROOT).parts]
    assert len(paths) > 150
    found = [f"{path.relative_to(ROOT)}: {name}" for path in paths
             for name in wrong(path, path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("text", "count"), [
    ("#include <vector>\nstd::vector<int> a;  // std::map\n", 0),
    ("std::vector<int> a;\n", 1), ("#include <vector>\nstd::quite_new a;\n", 1),
    ("int64_t a;\n", 1), ('#include "core/thread_pool.h"\nint64_t a;\n', 0),
])
def test_planted(text, count):
    assert len(list(wrong(ROOT / "src" / "core" / "planted.cpp", text))) == count
