#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check_rooms.py [ROOT]: the house rules that a script can hold.

- the arrow: a file includes only rooms further down (ARROW: the first line that fits decides);
- CUDA headers stay in the rooms that may use them;
- sizes, line width, ASCII, the SPDX line, no path of somebody's machine;
- no identifier of moec.h is a keyword of a language that binds it.

Prints each breach as `path:line: what`, and at the end `N passed, M failed` over the files.
tests/house/test_rooms.py plants one breach of each kind and sees it reported.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HEADER = "capi/include/moec/moec.h"

# Files of this room | what they may include. A folder stands for all that is in it; every file may
# include its neighbours of the same folder. "std" alone also forbids system headers of others.
BACKEND = ["src/backend/[^/]*$", "src/quant/", "src/math/", "src/core/", HEADER]
ARROW = [
    (r"capi/include/", []),
    (r"capi/", ["src/layer/", "src/core/", HEADER]),
    (r"src/layer/", ["src/ep/", "src/experts/", *BACKEND]),
    (r"src/ep/", BACKEND),
    (r"src/experts/", BACKEND),
    (r"src/backend/[^/]*$", ["src/quant/", "src/core/", HEADER]),
    (r"src/backend/cpu/", BACKEND),
    (r"src/backend/cuda/device/", BACKEND),
    (r"src/backend/cuda/(routing|plan|rows|weights)/", [*BACKEND, "src/backend/cuda/device/"]),
    (r"src/backend/cuda/", [*BACKEND, "src/backend/cuda/"]),
    (r"src/quant/", ["src/core/", HEADER]),
    (r"src/math/", ["src/core/", HEADER]),
    (r"src/core/", [HEADER]),
    (r"tests/oracle/.*_test\.cpp", ["tests/", HEADER]),
    (r"tests/oracle/", []),
    (r"tests/golden/", ["tests/oracle/", "tests/support/", HEADER]),
    (r"tests/support/", ["tests/", HEADER]),
    (r"tests/unit/", ["src/", "tests/", HEADER]),
    (r"tests/gpu/", ["src/", "tests/", "capi/include/"]),
    (r"tests/capi/", ["tests/", "capi/include/"]),
    (r"tests/mpi/", ["tests/", "capi/include/"]),
    (r"tests/", ["tests/", HEADER]),
    (r"bench/gpu/", ["src/", "bench/", "tests/", HEADER]),
    (r"bench/", ["bench/", "tests/support/", HEADER]),
    (r"bindings/", ["bindings/", "capi/include/"]),
]
ROOTS = ["src", "tests", "capi/include", "capi", "bench", "."]  # where "..." and <moec/...> may lie
STANDARD_ONLY = r"tests/oracle/(?!.*_test\.cpp)"
CUDA_ROOMS = (r"src/backend/cuda/|tests/gpu/|bench/gpu/|tests/support/device\.h|"
              r"examples/c/(graph|train_nccl)\.c")
CUDA_HEADER = r"(cuda|cub/|cublas|cooperative_groups|nccl|mma\.h|thrust/)"

CODE = {".c", ".h", ".cpp", ".cu", ".cuh", ".i"}
TEXT = CODE | {".py", ".sh", ".cmake", ".rs", ".jl", ".go", ".toml", ".in"}
SIZES = [(HEADER, 1400), (r"bindings/.*(raw|_sys|LibMoec)", None), (r".*", 400)]
WIDTH = 100
MACHINE_PATH = re.compile(r"(?<![\w.$}/-])/(work|root|home|tmp)/")
INCLUDE = re.compile(r'^\s*[#%]\s*include\s*([<"])([^">]+)[">]')

KEYWORDS = set(
    # C and C++
    """auto break case char const continue default do double else enum extern float for goto if int
    long register return short signed sizeof static struct switch typedef union unsigned void
    volatile while inline restrict alignas alignof and and_eq asm bitand bitor bool catch class
    compl concept consteval constexpr constinit const_cast co_await co_return co_yield decltype
    delete dynamic_cast explicit export false friend mutable namespace new noexcept not not_eq
    nullptr operator or or_eq private protected public reinterpret_cast requires static_assert
    static_cast template this thread_local throw true try typeid typename using virtual wchar_t xor
    xor_eq
    """.split()
    # Python
    + """and as assert async await class def del elif except finally from global import in is
    lambda None nonlocal not or pass raise True False with yield match""".split()
    # Rust
    + """as async await crate dyn fn impl in let loop match mod move mut pub ref self Self super
    trait type unsafe use where abstract become box final macro override priv typeof unsized virtual
    yield gen""".split()
    # Go
    + """chan defer fallthrough func go import interface map package range select type
    var""".split()
    # Julia
    + """baremodule begin end export function global import isa let local macro module quote
    struct using where abstract primitive""".split()
)
C_OWN = set("const struct typedef enum void char float double int long unsigned extern".split())


def room_rule(path):
    """The ARROW line of a file, or None for a file that no rule covers."""
    return next((allowed for room, allowed in ARROW if re.match(room, path)), None)


def resolve(root, path, name):
    """The repository file that `name`, included by `path`, means; None if it is not ours."""
    places = [Path(path).parent, *map(Path, ROOTS)]
    for place in places:
        if (root / place / name).is_file():
            return (place / name).as_posix()
    return None


def include_breaches(root, path, number, line):
    found = INCLUDE.match(line)
    if not found:
        return
    quote, name = found.groups()
    target = resolve(root, path, name)
    if target is None:
        if re.match(CUDA_HEADER, name) and not re.match(CUDA_ROOMS, path):
            yield f"{path}:{number}: CUDA header {name} outside the CUDA rooms"
        if re.match(STANDARD_ONLY, path) and (quote == '"' or "/" in name or "." in name):
            yield f"{path}:{number}: {name}; the oracle includes only the standard library"
        return
    allowed = room_rule(path)
    if allowed is None or Path(target).parent == Path(path).parent:
        return
    if not any(re.match(rule, target) for rule in allowed):
        rule = ", ".join(allowed) or "nothing"
        yield f"{path}:{number}: may not include {target}; allowed: {rule}"


def text_breaches(path, lines):
    limit = next(limit for pattern, limit in SIZES if re.match(pattern, path))
    if limit and len(lines) > limit:
        yield f"{path}: {len(lines)} lines; split it, the limit is {limit}"
    if "SPDX-License-Identifier: Apache-2.0" not in "".join(lines[:2]):
        yield f"{path}:1: no SPDX-License-Identifier line"
    for number, line in enumerate(lines, 1):
        if len(line.rstrip("\n")) > WIDTH and limit:
            yield f"{path}:{number}: {len(line.rstrip())} columns; the limit is {WIDTH}"
        if not line.isascii():
            yield f"{path}:{number}: a character that is not ASCII"
        if MACHINE_PATH.search(line) and not path.endswith("check_rooms.py"):
            yield f"{path}:{number}: a path of somebody's machine"


def keyword_breaches(path, text):
    """Names declared in the header: parameters, fields, functions, types, constants."""
    text = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.S)
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        for word in re.findall(r"[A-Za-z_]\w*", line):
            if word in KEYWORDS - C_OWN:
                yield f"{path}:{number}: `{word}` is a keyword of a language that binds this header"


def breaches(root, path):
    lines = (root / path).read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    yield from text_breaches(path, lines)
    if Path(path).suffix in CODE:
        for number, line in enumerate(lines, 1):
            yield from include_breaches(root, path, number, line)
    if path == HEADER:
        yield from keyword_breaches(path, "".join(lines))


def listed(root):
    """What git tracks or would add. A source archive has no repository, or lies in another's: an
    empty one knows what to leave out."""
    def git(*arguments, check=True, **variables):
        return subprocess.run(["git", "-C", str(root), *arguments], env=os.environ | variables,
                              capture_output=True, text=True, check=check).stdout

    listing = ["ls-files", "-co", "--exclude-standard", "-z"]
    top = git("rev-parse", "--show-toplevel", check=False).removesuffix("\n")
    if top and Path(top).resolve() == root:
        paths = git(*listing)
    else:
        with tempfile.TemporaryDirectory() as folder:
            empty = {"GIT_DIR": folder, "GIT_WORK_TREE": str(root)}
            git("init", "-q", **empty)
            paths = git(*listing, **empty)
    return [path for path in paths.split("\0") if (root / path).is_file()]


def source_files(root):
    return [path for path in listed(root) if path.endswith((*TEXT, "CMakeLists.txt"))]


def main():
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    paths = source_files(root)
    if not paths:
        sys.exit(f"check_rooms.py: no sources were found in {root}")
    failed = 0
    for path in paths:
        found = list(breaches(root, path))
        failed += bool(found)
        print("".join(line + "\n" for line in found), end="")
    print(f"{len(paths) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
