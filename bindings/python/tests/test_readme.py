# SPDX-License-Identifier: Apache-2.0
"""The README's first example, run as it is written; the frameworks' are in framework_tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    block = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)[0]
    exec(compile(block, str(README), "exec"), {})
    assert capsys.readouterr().out == "(16, 64) (16, 64) (8, 64, 128)\n"
