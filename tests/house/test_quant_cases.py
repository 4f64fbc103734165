# SPDX-License-Identifier: Apache-2.0
"""tests/golden/quant_cases.json is what make_quant_cases.py makes of the files. Shown to fail: a
changed name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "golden"))
import make_quant_cases  # noqa: E402


def test_the_table_is_made_from_the_files():
    assert make_quant_cases.TARGET.read_text() == make_quant_cases.table()
