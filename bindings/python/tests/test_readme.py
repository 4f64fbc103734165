# SPDX-License-Identifier: Apache-2.0
"""The README's first program and that of the page on quantised weights, run as they are written;
its second, and other pages' are run in framework_tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import moec
from moec.kinds import KINDS

README = Path(__file__).parents[1] / "README.md"
QUANTISED = Path(__file__).parents[3] / "docs/howto/quantised.md"


def test_quantised_weights(capsys: pytest.CaptureFixture[str]) -> None:
    """Codes are a tenth off at four bits and a hundredth at eight."""
    (block,) = re.findall(r"```python\n(.*?)```", QUANTISED.read_text(), re.S)
    exec(compile(block, str(QUANTISED), "exec"), {})
    lines = [line.rpartition(" ") for line in capsys.readouterr().out.splitlines()]
    errors = {name: float(error) for name, _, error in lines if name in ("nf4", "int8")}
    assert 0.05 < errors["nf4"] < 0.2 and 0 < errors["int8"] < 0.03
    assert any(name + last == "(64,32)" for name, _, last in lines)


def test_the_schemes_are_in_the_table() -> None:
    text = QUANTISED.read_text()
    names = [scheme.name for scheme in moec.Scheme if scheme]
    assert all(f"`{name}`" in text or f"`{name.removeprefix('GGUF')}`" in text for name in names)
    assert all(f"`{kind.name}`" in text for kind in KINDS)


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    block, _ = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    exec(compile(block, str(README), "exec"), {})
    assert capsys.readouterr().out == "(16, 64) (16, 64) (8, 64, 128)\n"
