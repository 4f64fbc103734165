# SPDX-License-Identifier: Apache-2.0
"""The README's example of each framework, run as it is written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
PRINTED = {
    "moec.torch.MoELayer": "torch.Size([16, 64]) ['gate_up', 'down', 'gate_weight']\n",
    "moec.torch.Experts(": "torch.bfloat16 torch.Size([16, 64]) torch.uint8\n",
    "save_adapter": "('default', 'again') None\n",
    "moec.transformers.report": "True\n",
    "moec.transformers.enable(model)])": "['Qwen3MoeExperts', 'Qwen3MoeExperts']\n",
    "p.grad is not None": "8\n",
    "moec.jax": "{'down': (8, 64, 128), 'gate_up': (8, 256, 64), 'gate_weight': (8, 64)}\n",
}


@pytest.mark.parametrize("module", PRINTED)
def test_the_example(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (b for b in BLOCKS if module in b)
    exec(compile(block, str(README), "exec"), {})
    assert capsys.readouterr().out == PRINTED[module]


def test_the_example_of_the_repository(capsys: pytest.CaptureFixture[str]) -> None:
    page = README.parents[2] / "README.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    exec(compile(block, str(page), "exec"), {})
    assert capsys.readouterr().out == "torch.Size([16, 64]) torch.Size([8, 256, 64])\n"


def test_frameworks_are_imported_by_their_modules_alone() -> None:
    text = "import moec, sys; sys.exit(bool({'torch', 'transformers', 'jax'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", text], check=True)
