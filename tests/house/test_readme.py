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
import quantised_goals  # noqa: E402
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


def test_quantised_experts_have_goals_and_a_line(tmp_path):
    """A ratio is to the bf16 of the very format; a peer whose windows disagree, or of another
    call, decides nothing."""
    def row(impl, beside, ms, over, tokens=4096, mode="fwd", spread=0.01, call=1):
        return dict(shape="gpt-oss-20b", tokens=tokens, mode=mode, impl=impl, beside=beside, ms=ms,
                    over_bf16=over, spread=spread, floor_ms=0.5, workspace_mib=8.0, call=call)

    rows = [row("moec-bf16", "moec-nf4", 1.0, 1.0), row("moec-nf4", "moec-nf4", 1.2, 1.2),
            row("moec-bf16", "moec-mxfp4", 2.0, 1.0), row("moec-mxfp4", "moec-mxfp4", 2.5, 1.25),
            row("moec-nf4", "moec-nf4", 1.0, 0.5, 64), row("moec-nf4", "moec-nf4", 3.0, 1.5, 4096,
                                                           "step"),
            row("nf4_stack", "moec-nf4", 2.4, 2.4), row("nf4_rec", "moec-nf4", 9.0, 3.0, 4096,
                                                        "step", spread=0.2),
            row("triton-mxfp4", "moec-mxfp4", 4.0, 2.0),
            row("triton-mxfp4-ids", "moec-mxfp4", 3.5, 1.75),
            row("triton-mxfp4", "moec-mxfp4", 0.1, 1.0, 256, call=2),
            row("moec-mxfp4", "moec-mxfp4", 2.5, 1.25, 256),
            row("moec-portable", "moec-mxfp4", 5.0, 2.5)]
    path = tmp_path / "h200/quantised.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"rows": rows}))
    made = quantised_goals.gpu_summary(path)
    for begin in ("| forward / bf16 | 4096 | 1.2, -, - for <= 1.25 | -, -, - for <= 1.15 "
                  "| **1.25**, -, - for <= 1.1 |",
                  "| forward / floor | 64 | **2**, -, - for <= 1.8",
                  "| portable: x Hopper's speed | 4096 | -, -, - for >= 0.4 |  | 0.5, -, -",
                  "| forward, x nf4_stack | 4096 | 2 for >= 1.75, - for >= 3",
                  "| step, x nf4_rec | 4096 | - for >= 1.9", "| workspace - bf16's | any | 0 MiB",
                  "| forward, x triton_kernels | 256 |  |  | -, -, - for >= 1.5",
                  "| forward, x triton_kernels | 4096 |  |  | 1.4, -, - for >= 1.2"):
        assert any(line.startswith(begin) for line in made), begin
    assert made[0].startswith("6 of 220 goals met, 211 not measured: NF4 3 of 44, ")
    (line,) = tables.coded(SimpleNamespace(results=tmp_path))
    assert line == (
        "- **Quantised experts**, frozen, of 4 and 8 bits on an H200, beside the same values in "
        "bf16: a forward of 64 tokens is 2.00 times as fast, of 4096 tokens 0.80 to 0.83 times, "
        "a step of 4096 tokens 0.67 times. NF4's forward of 4096 tokens is 2.00 times as fast as "
        "bitsandbytes' stacks in `grouped_mm`, MXFP4's forward 1.40 times as fast as "
        "triton_kernels'.")


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
