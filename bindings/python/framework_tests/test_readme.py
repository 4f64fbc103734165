# SPDX-License-Identifier: Apache-2.0
"""The example of the repository's README and the QLoRA of Python's, run as they are written, and
what modules import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import tokens
from packed_models import saved
from peft import PeftModel

README = Path(__file__).parents[3] / "README.md"
PYTHON = Path(__file__).parents[1] / "README.md"


def test_the_example_of_the_repository(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    exec(compile(block, str(README), "exec"), {})
    assert capsys.readouterr().out == "torch.Size([16, 64]) torch.Size([8, 256, 64])\n"


def test_the_qlora_of_the_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All stacks are packed, and adapters of experts have gradients."""
    _, block = re.findall(r"```python\n(.*?)```", PYTHON.read_text(), re.S)
    names = {"folder": saved(tmp_path, "qwen3_moe"), "ids": tokens()}
    exec(compile(block, str(PYTHON), "exec"), names)
    assert "4 of 4 stacks packed" in capsys.readouterr().out
    model = names["model"]
    assert isinstance(model, PeftModel)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert sum("experts" in name for name in trained) == 8
    assert all(isinstance(p.grad, torch.Tensor) for p in trained.values())


def test_frameworks_are_imported_by_their_modules_alone() -> None:
    text = "import moec, sys; sys.exit(bool({'torch', 'transformers', 'jax'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", text], check=True)
