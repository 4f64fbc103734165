# SPDX-License-Identifier: Apache-2.0
"""bench/gpu/lora_bench.py on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ranks import run_program

pytest.importorskip("bitsandbytes")
BENCH = Path(__file__).resolve().parents[3] / "bench/gpu/lora_bench.py"
BASES = {"moec-bf16", "moec-nf4"}


def test_small_run(tmp_path: Path) -> None:
    out = tmp_path / "lora.json"
    said = run_program(tmp_path, BENCH, "--device", "cpu", "--small", "--case",
                       "qwen3-30b-a3b:24", "--rounds", "1", "--out", out)
    assert "0 wrong" in said
    rows = json.loads(out.read_text())["rows"]
    adapted = {base + storage for base in BASES for storage in ("-lora", "-lora-peft")}
    everybody = BASES | adapted | {"torch-factored", "torch-delta"}
    for mode in ("fwd", "step"):
        assert {row["impl"] for row in rows if row["mode"] == mode} == everybody
    assert all(row["ms"] > 0 and row["over_base"] > 0 for row in rows)
