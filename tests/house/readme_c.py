# SPDX-License-Identifier: Apache-2.0
"""README's C program as it stands, or changed for a GPU as docs/howto/c.md says. As a program it
prints the one for a GPU, which scripts/build_gpu_bindings.sh compiles."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
F32 = re.compile(r"^static moec_tensor f32\(.*?^}\n", re.DOTALL | re.MULTILINE)


def programs() -> tuple[str, str]:
    """(for the CPU, for a GPU)"""
    pages = ROOT / "README.md", ROOT / "docs/howto/c.md"
    (program,), (change,) = (re.findall(r"```c\n(.*?)```", page.read_text(), re.DOTALL)
                             for page in pages)
    changed, count = F32.subn(lambda _: change, program)
    assert count == 1 and F32.search(change), "README.md's f32 is not found"
    before = "moec_context_create(NULL, &context)"
    assert changed.count(before) == 1, f"README.md's program has no {before}"
    return program, changed.replace(before, "moec_context_create(&gpu, &context)")


if __name__ == "__main__":
    print(programs()[1])
