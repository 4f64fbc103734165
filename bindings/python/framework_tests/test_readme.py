# SPDX-License-Identifier: Apache-2.0
"""The example of the repository's README, run as it is written, and what modules import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[3] / "README.md"


def test_the_example_of_the_repository(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    exec(compile(block, str(README), "exec"), {})
    assert capsys.readouterr().out == "torch.Size([16, 64]) torch.Size([8, 256, 64])\n"


def test_frameworks_are_imported_by_their_modules_alone() -> None:
    text = "import moec, sys; sys.exit(bool({'torch', 'transformers', 'jax'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", text], check=True)
