# SPDX-License-Identifier: Apache-2.0
"""bench/gpu/ep_bench.py on two ranks of a CPU, and its goals."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import program, run_ranks

BENCH = Path(__file__).resolve().parents[3] / "bench"
sys.path.insert(0, str(BENCH))
import ep_goals  # noqa: E402

SCHEMES = {"auto", "gather", "rows", "exact"}


def test_cases_that_options_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH / "gpu")
    ep_bench = importlib.import_module("ep_bench")

    def chosen(*options: str) -> list[tuple[str, int, bool]]:
        """(shape, tokens, whether it is a layer)"""
        monkeypatch.setattr(sys, "argv", ["ep_bench.py", "--out", "none", *options])
        return [(*case[:2], case[2] is ep_bench.LAYERS)
                for case in ep_bench.chosen(ep_bench.arguments())]

    assert chosen("--case", "qwen3-30b:16384", "--op", "layer") == [("qwen3-30b", 16384, True)]
    assert chosen("--case", "gpt-oss-120b:16,128,deepseek-v3:16", "--op", "transport") == [
        ("gpt-oss-120b", 16, False), ("gpt-oss-120b", 128, False), ("deepseek-v3", 16, False)]
    assert chosen("--case", "qwen3-30b:16", "--case", "gpt-oss-120b:16") == [
        (name, 16, layer) for name in ("qwen3-30b", "gpt-oss-120b") for layer in (False, True)]
    assert {name for name, *_ in chosen()} == {"qwen3-30b", "gpt-oss-120b", "deepseek-v3"}
    for wrong in ("16", "qwen3-30b", "qwen3-30b:0", "qwen3-30b:x", "qwen3-31b:16"):
        with pytest.raises(SystemExit):
            chosen("--case", wrong)


def test_ranks_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH / "gpu")
    ep_bench, ep_ranks = map(importlib.import_module, ("ep_bench", "ep_ranks"))
    monkeypatch.setattr(sys, "argv", ["ep_bench.py", "--device", "cpu", "--out", "none"])
    monkeypatch.setattr(ep_bench, "start", lambda *given: given)
    assert ep_bench.main() == (2, sys.argv)

    text = "import os, sys, time; rank = os.environ['RANK']; assert os.environ['WORLD_SIZE'] == '2'"
    told = f"{text}; open(os.environ['MOEC_BENCH_MEET'] + rank, 'w').write(sys.argv[1])"
    monkeypatch.setattr(ep_ranks.tempfile, "mkdtemp", lambda: str(tmp_path))
    assert ep_ranks.start(2, ["-c", told, "given"]) == 0
    assert [(tmp_path / f"meet{rank}").read_text() for rank in range(2)] == ["given"] * 2
    begin = time.monotonic()  # one that fails ends the others
    assert ep_ranks.start(2, ["-c", f"{text}; time.sleep(60 * int(rank)); sys.exit(1)"]) != 0
    assert time.monotonic() - begin < 30


def one_rank(rank: int, size: int, folder: Path, *given: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo",
                   "MOEC_BENCH_MEET": str(folder / "meet")}
    program(rank, size, folder, str(BENCH / "gpu/ep_bench.py"), *given)


def test_small_run(tmp_path: Path) -> None:
    out = tmp_path / "ep.json"
    said, _ = run_ranks(one_rank, 2, tmp_path, "--device", "cpu", "--small", "--window", "0.001",
                        "--out", str(out))
    assert "0 wrong" in said
    assert "peer refused: moec_ep_create: rank 0 does not reach the memory" in said
    file = json.loads(out.read_text())
    found: dict[str, set[str]] = {}
    for row in file["rows"]:
        assert row["us"] > 0 and row["imbalance"] >= 1
        found.setdefault(row["op"], set()).add(row["impl"])
        if row["impl"] in SCHEMES - {"auto"}:
            assert row["scheme"] == row["impl"]
        if row["impl"] in SCHEMES and row["op"] in ("dispatch", "combine", "pair"):
            assert row["model_us"] > 0
    for op in ("dispatch", "combine", "pair"):
        assert found[op] == SCHEMES | {"torch"}
    for op in ("layer_fwd", "layer_step"):
        assert found[op] == SCHEMES | {"local", "torchtitan", "transformers", "one_gpu"}


def row(op: str, impl: str, us: float, tokens: int = 4096, **values: Any) -> dict[str, Any]:
    return dict(shape="qwen3-30b", tokens=tokens, op=op, impl=impl, us=us, **values)


def test_goals_are_met_or_open() -> None:
    rows = ep_goals.EpRows({"rows": [
        row("dispatch", "auto", 10.0, 16, limit_us=7.0), row("combine", "auto", 13.1, 16,
                                                             limit_us=7.0),
        row("dispatch", "auto", 54.9, limit_us=50.0), row("combine", "auto", 66.0, limit_us=50.0),
        row("pair", "auto", 110.0, limit_us=100.0, host_syncs=0, allocs=1),
        row("pair", "peer", 100.0, limit_us=100.0), row("pair", "nccl", 124.0),
        row("pair", "torch", 1100.0), row("layer_fwd", "auto", 100.0, limit_us=80.0),
        row("layer_step", "auto", 300.0, limit_us=239.0), row("layer_step", "torchtitan", 600.0),
    ]})
    made = {(tokens, what): ep_goals.is_met(*rest)
            for _, tokens, what, *rest in ep_goals.goals(rows, {"qwen3-30b": 8})}
    assert made == {
        (16, "dispatch above the limit, us"): True, (16, "combine above the limit, us"): False,
        (4096, "dispatch over the limit"): True, (4096, "combine over the limit"): False,
        (4096, "pair of peer, x NCCL"): False, (4096, "pair over NCCL's"): True,
        (4096, "pair, x torch"): True, (4096, "fwd beside one GPU"): True,
        (4096, "step beside one GPU"): False, (4096, "step, x torchtitan's way"): True,
        (4096, "waits and allocations"): False,
    }
    assert ep_goals.summary(rows, {})[0] == "6 of 11 goals are met."


def test_four_ranks_have_bars_of_their_own() -> None:
    rows = ep_goals.EpRows({"ranks": 4, "rows": [
        row("pair", "auto", 100.0), row("dispatch", "auto", 45.0, limit_us=None),
        row("pair", "torch", 399.0),
        row("pair", "gather", 200.0, model_us=171.0), row("pair", "rows", 200.0, model_us=228.0),
        row("layer_fwd", "auto", 1125.0), row("layer_fwd", "local", 1000.0),
        row("layer_step", "auto", 3340.0), row("layer_step", "local", 3000.0),
        row("layer_step", "torchtitan", 3400.0),
    ]})
    made = {what: ep_goals.is_met(*rest)
            for _, _, what, *rest in ep_goals.goals(rows, {"qwen3-30b": 8})}
    assert made == {
        "pair, x torch": False, "error of epsim, the worst": True,
        "fwd over 1.03 x local, and transport": True,  # 1030 + 100
        "step over 1.03 x local, and transport": False,  # 3090 + 2 x 100 + 45
    }
    assert len(ep_goals.summary(rows, {}, only_open=True)) == 6
