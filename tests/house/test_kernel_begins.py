# SPDX-License-Identifier: Apache-2.0
"""Every kernel waits for the one before it, and none returns in front of that: a kernel that ends
without its wait lets the next one read what an earlier one still writes."""

import re
from pathlib import Path

import pytest

CUDA = Path(__file__).parents[2] / "src" / "backend" / "cuda"
WAITS = ("begin_kernel(", "grid_dependency_wait(")
KERNEL = "__global__ void f(int* a) {"


def body(text, begin):
    """The text between the first brace from `begin` on and the one that closes it."""
    begin = text.index("{", begin)
    depth = 0
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin:at]
    raise ValueError("a brace is not closed")


def faults(source):
    """(kernels, what is wrong with some of them)."""
    text = re.sub(r"//[^\n]*", "", source)
    found, kernels = [], [m.end() for m in re.finditer("__global__", text)]
    for begin in kernels:
        kernel = body(text, begin)
        waits = [kernel.index(wait) for wait in WAITS if wait in kernel]
        returns = re.search(r"\breturn\b", kernel)
        if not waits:
            found.append("does not wait: " + text[begin:text.index("{", begin)].strip())
        elif returns and returns.start() < min(waits):
            found.append("returns before it waits: " + text[begin:text.index("{", begin)].strip())
    return len(kernels), found


def test_kernels_wait_for_those_before_them():
    kernels, wrong = 0, []
    for path in sorted(CUDA.rglob("*.cu*")):
        of_file, found = faults(path.read_text())
        kernels += of_file
        wrong += [f"{path.name}: {fault}" for fault in found]
    assert not wrong
    assert kernels > 100


@pytest.mark.parametrize(("code", "fault"), [
    (KERNEL + " begin_kernel(); if (!a) return; *a = 1; }", None),
    (KERNEL + " int b[2] = {1, 2}; ptx::grid_dependency_wait(); *a = b[0]; }", None),
    (KERNEL + " if (!a) return; begin_kernel(); *a = 1; }", "returns before it waits"),
    (KERNEL + " *a = 1; }  // begin_kernel();", "does not wait"),
    (KERNEL + " *a = 1; } void g() { begin_kernel(); }", "does not wait"),
])
def test_planted(code, fault):
    _, found = faults(code)
    assert [f for f in found if fault and fault in f] == found
    assert len(found) == (fault is not None)
