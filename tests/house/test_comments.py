# SPDX-License-Identifier: Apache-2.0
"""A file that a comment or a page names is in the repository, or on the list of those elsewhere.

Shown to fail: comments of each language that name a missing file are planted.
"""

import re
from pathlib import Path

import check_rooms
import pytest

ROOT = Path(__file__).resolve().parents[2]
SUFFIX = r"(?:cpp|cuh|cu|[ch](?:\.in)?|inc|py|sh|cmake|md|txt|json|jl|rs|go|toml|ini|i|svg)"
NAMED = re.compile(rf"(?<![\w.$*<>{{}}/%-])((?:[\w-]+/)*[\w-]+\.{SUFFIX})(?![\w(*]|\.\w)")
STRING = r'"(?:\\.|[^"\\\n])*"'
SLASHES = re.compile(rf"{STRING}|'\\?.'|(//[^\n]*|/\*.*?\*/)", re.DOTALL)
HASHES = re.compile(rf'("""(?:.*?)""")|{STRING}|\'[^\'\n]*\'|((?:^|(?<=\s))#[^\n]*)',
                    re.DOTALL | re.MULTILINE)
LANGUAGES = {
    **dict.fromkeys((".c", ".h", ".cpp", ".cu", ".cuh", ".i", ".rs", ".go"), SLASHES),
    **dict.fromkeys((".py", ".sh", ".cmake", ".jl", ".toml", ".txt"), HASHES),
    ".md": re.compile(r"(.+)", re.DOTALL),
}
PLACEHOLDER = re.compile(r"(.*-)?[A-Z]+\.")  # NAME.cpp, moec-N.json
ELSEWHERE = {
    "config.json", "hf_quant_config.json",  # of a checkpoint
    "stddef.h",  # the compiler's
    "llama.cpp",  # a project
    "build_id.h", "fuzz_table.inc", "gpu_tests.txt", "links.txt", "Artifacts.toml",  # made
    "program.c", "layer.c", "tour.c",  # a test writes it; a reader does
}
PLANTED = [  # file, its text, what is reported
    ("a.cpp", 'f("x.cpp");  // as in none.cu', "a.cpp:1: none.cu"),
    ("a.h", "int a;\n/* one\n   cuda/none.cuh */", "a.h:3: cuda/none.cuh"),
    ("a.rs", "/// none.rs, and lib.rs", "a.rs:1: none.rs"),
    ("a.py", '"""Text.\n\n    none.py --check\n"""', "a.py:3: none.py"),
    ("a.sh", 'x="# y.sh"  # like none.sh', "a.sh:1: none.sh"),
    ("a.cmake", "# see none.cmake", "a.cmake:1: none.cmake"),
    ("a.md", "# A\n`bench/none.py` is here", "a.md:2: bench/none.py"),
]
CLEAN = [
    ("a.cpp", "// lib.rs, NAME.cpp, moec-N.json, *.cu, a.cpp; libcuda.so.1; layer.h's"),
    ("a.py", "x = 'none.py'  # lib.rs"),
    ("a.sh", "echo none.sh \"$#\" ${x#none.sh}"),
]


def comments(path, text):
    """(line, comment) of a source file."""
    for found in LANGUAGES[Path(path).suffix].finditer(text):
        comment = next(filter(None, found.groups()), None)
        if comment:
            yield text.count("\n", 0, found.start()) + 1, comment


def missing(path, text, known):
    """`path:line: name` for each file that a comment names and that is not `known`."""
    for line, comment in comments(path, text):
        for found in NAMED.finditer(comment):
            name = found[1].rsplit("/", 1)[-1]
            if name not in known and not PLACEHOLDER.match(name):
                yield f"{path}:{line + comment[:found.start()].count(chr(10))}: {found[1]}"


def repository():
    """Names of all its files."""
    return {Path(path).name for path in check_rooms.listed(ROOT)}


def test_files_named_in_comments_exist():
    known = repository() | ELSEWHERE
    paths = [path for path in check_rooms.listed(ROOT) if Path(path).suffix in LANGUAGES]
    found = [name for path in paths for name in missing(path, (ROOT / path).read_text(), known)]
    assert found == []


@pytest.mark.parametrize("path, text, reported", PLANTED)
def test_a_planted_name_is_reported(path, text, reported):
    assert list(missing(path, text, {"lib.rs"})) == [reported]


@pytest.mark.parametrize("path, text", CLEAN)
def test_other_words_are_not(path, text):
    assert list(missing(path, text, {"lib.rs", "a.cpp", "layer.h"})) == []
