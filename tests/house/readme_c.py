# SPDX-License-Identifier: Apache-2.0
"""README's C program as it stands, or changed for a GPU as README says. As a program it prints the
one for a GPU, which scripts/build_gpu_bindings.sh compiles."""

import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"
F32 = re.compile(r"^static moec_tensor f32\(.*?^}\n", re.DOTALL | re.MULTILINE)


def programs(readme: Path = README) -> tuple[str, str]:
    """(for the CPU, for a GPU)"""
    program, change = re.findall(r"```c\n(.*?)```", readme.read_text(), re.DOTALL)
    changed, count = F32.subn(lambda _: change, program)
    assert count == 1 and F32.search(change), "README.md's f32 is not found"
    before = "moec_context_create(NULL, &context)"
    assert changed.count(before) == 1, f"README.md's program has no {before}"
    return program, changed.replace(before, "moec_context_create(&gpu, &context)")


if __name__ == "__main__":
    print(programs()[1])
