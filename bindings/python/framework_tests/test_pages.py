# SPDX-License-Identifier: Apache-2.0
"""Programs of docs/, run as they are written, and the Python examples. Shown to fail: a printed
text and a program are changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_program

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
import page_code  # noqa: E402

PAGES = page_code.programs("python")


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)


@pytest.mark.parametrize("page", PAGES)
def test_the_program_of_a_page(page: str, tmp_path: Path) -> None:
    program, printed = PAGES[page]
    file = tmp_path / "page.py"
    file.write_text(program)
    if "import torch" in program or "moec.torch" in program:
        said = iter(run_program(tmp_path, file).splitlines())  # warnings may come between
        assert all(line in said for line in printed.splitlines())
        return
    done = run(file)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout


def test_a_change_is_seen() -> None:
    program, printed = PAGES["errors"]
    assert printed and printed.replace("5", "6", 1) not in run("-c", program).stdout
    assert run("-c", program.replace("== 3", "== 4")).returncode != 0


@pytest.mark.parametrize("example", ["jax/train.py", "checkpoint/run.py"])
def test_an_example(example: str) -> None:
    done = run(ROOT / "examples" / example)
    assert done.returncode == 0, done.stderr
