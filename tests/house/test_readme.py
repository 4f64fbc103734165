# SPDX-License-Identifier: Apache-2.0
"""README's table of speeds is the one that the committed results make.

Shown to fail when a digit of the table is changed by hand.
"""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "bench/readme_table.py"


def test_table_is_generated():
    run = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
