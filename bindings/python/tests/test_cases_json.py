# SPDX-License-Identifier: Apache-2.0
"""tests/golden/cases.json, which the other bindings' golden tests read, is what this package's
families table says."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "tests/golden/make_cases.py"


def test_cases_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
