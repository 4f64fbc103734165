# SPDX-License-Identifier: Apache-2.0
"""docs/_ext/tables.py: the table of formats follows moec.h and src/quant/format.h."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs/_ext"))
import tables  # noqa: E402

LAST = "  MOEC_SCHEME_GGUF_MXFP4 = 14 /* by llama.cpp */\n"
PLANTED = LAST.replace("14", "14,") + "  /* u8 [E,R,C]: q */\n  MOEC_SCHEME_PLANTED = 15"


def test_each_format_has_a_row():
    rows = tables.formats()[2:]
    assert len(rows) == len(tables.format_list("Formats"))
    assert rows[0].startswith("| `INT8` | compressed-tensors, LLM Compressor | either |")


def test_moec_h_says_who_writes_a_format(header):
    text = header.read_text()
    assert LAST in text
    planted = tables.schemes(text.replace(LAST, PLANTED + " /* wide; by nobody, v1 */\n"))
    assert planted["PLANTED"] == ("u8 [E,R,C]: q wide", "nobody, v1")
    for behind in ("", " /* wide */"):
        with pytest.raises(ValueError, match="MOEC_SCHEME_PLANTED .*`by` and who writes"):
            tables.schemes(text.replace(LAST, f"{PLANTED}{behind}\n"))


def test_a_format_without_a_class_is_refused(header, tmp_path, monkeypatch):
    planted = tmp_path / "moec.h"
    planted.write_text(header.read_text().replace(LAST, PLANTED + " /* by nobody */\n"))
    monkeypatch.setattr(tables, "HEADER", planted)
    with pytest.raises(ValueError, match="moec.h has 15 schemes, .* has 14 formats"):
        tables.formats()
