# SPDX-License-Identifier: Apache-2.0
"""What pages say about speed, and README's plot, is what the committed results make; and a link of
a page to a file of the repository leads to one.

Shown to fail: a digit of each made file is changed, and a link that leads nowhere is planted.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from check_rooms import listed

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import report  # noqa: E402
import report_ep  # noqa: E402
import report_tables as tables  # noqa: E402

MADE = [*report.BLOCKS, report.PLOT]
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def test_pages_are_made_from_the_results():
    run = subprocess.run([sys.executable, ROOT / "bench/report.py", "--check"],
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("changed", MADE)
def test_a_changed_digit_is_seen(tmp_path, changed):
    for name in MADE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    assert report.stale(tmp_path) == []
    page = tmp_path / changed
    before, made = page.read_text().split("made by bench/report.py", 1)
    digit = re.search(r"\d", made).start()
    other = str(9 - int(made[digit]))
    page.write_text(f"{before}made by bench/report.py{made[:digit]}{other}{made[digit + 1:]}")
    assert report.stale(tmp_path) == [changed]


def test_a_fine_tune_has_a_line():
    """Of each model with a peer beside it: moec's time beside the peers' of the same turns."""
    beside = {"moec": 100.0, "dense": 250.0, "nf4": 300.0}

    def row(model, way, peak):
        return {"model": model, "impl": way, "ms": beside[way], "beside": beside, "peak_mib": peak}

    rows = [row("a", "moec", 1024), row("a", "dense", 4096), row("a", "nf4", 3072),
            row("b", "moec", 512), row("c", "dense", 512)]
    results = SimpleNamespace(read=lambda name: {
        "h200/qlora_models.json": {"machine": "A GPU, torch 2", "rows": rows}}[name])
    (line,) = tables.qlora(results)
    assert line == (
        "- **QLoRA** of four layers of a on an GPU: a step of adapters on NF4 experts is 2.50 "
        "times as fast as dense experts with PEFT, 3.00 times as fast as NF4 experts with PEFT. "
        "Its memory peaks at 1.0 GiB, theirs at 4.0 and 3.0.")


def test_ranks_have_tables_where_they_were_measured(tmp_path):
    """Of each machine; without one nothing is said."""
    results = SimpleNamespace(results=tmp_path, link=lambda path: f"[ep]({path.name})")
    assert report_ep.ep_tables(results) == report_ep.ep_headline(results) == []
    assert report_ep.support_row(results) is None

    def row(op, impl, us, limit=None, **values):
        return dict(shape="a", tokens=4096, op=op, impl=impl, us=us, limit_us=limit, **values)

    rows = [row("dispatch", "auto", 60.0, 50.0), row("combine", "auto", 70.0, 50.0),
            row("pair", "auto", 120.0, 100.0, scheme="peer"),
            row("pair", "peer", 125.0, model_us=115.0), row("layer_fwd", "local", 700.0),
            row("pair", "nccl", 180.0), row("layer_fwd", "auto", 800.0, 700.0),
            row("layer_step", "auto", 2000.0, 1600.0), row("layer_step", "torchtitan", 5000.0),
            row("layer_step", "transformers", 2500.0)]
    (tmp_path / "gpu_x2").mkdir()
    (tmp_path / "gpu_x2/ep.json").write_text(json.dumps(
        {"machine": "2 x A GPU, torch 2", "top_k": {"a": 8},
         "link": {"write_gb_per_s": 390.6, "barrier_us": 7.2}, "rows": rows}))
    made = report_ep.ep_tables(results)
    assert "| a | 4096 | 50.0 | 60.0 | 70.0 | 120 | peer | 1.50 | - |" in made
    assert "| a | 4096 | 800 | 700 | 0.88 | - | - | 2000 | - | 0.80 | 2.50 | 1.25 |" in made
    assert "| a | 4096 | 125, -8% | - | - | - | 180 | - |" in made
    assert "4 of 6 goals are met; those that are open:" in made
    (line,) = report_ep.ep_headline(results)
    assert line == (
        "- **Expert parallelism**, 2 x A GPU, 4096 tokens a rank, 1 layers: tokens go to their "
        "experts and back 1.50 times as fast as NCCL's own collectives move them; a "
        "training step is 2.50 times as fast as torchtitan's way, at 0.80 of one "
        "GPU's efficiency.")
    assert report_ep.support_row(results).endswith(
        "| memory of peers on one host, NCCL, callbacks; measured on 2 x A GPU |")


def broken(page, text):
    """Relative links of a page's text that lead nowhere."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return [link for link in LINK.findall(prose)
            if not re.match(r"\w+:", link) and not (page.parent / link).exists()]


@pytest.mark.parametrize("name", [name for name in listed(ROOT) if name.endswith(".md")])
def test_links_lead_somewhere(name):
    assert broken(ROOT / name, (ROOT / name).read_text()) == []


def test_a_broken_link_is_seen():
    text = "[here](README.md), [there](no/such.md), [away](https://example.org/no)"
    assert broken(ROOT / "README.md", text) == ["no/such.md"]
