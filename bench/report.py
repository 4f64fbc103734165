#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What pages say about speed, and README's plot: made from bench/results and never typed.

    python3 bench/report.py           rewrite them
    python3 bench/report.py --check   fail if one of them says something else

A page marks the place of a block by two comments, BEGIN with the block's name and END. A row of a
table has its beginning as its mark.
"""

import re
import sys
from pathlib import Path

import gpu_goals
import quantised_goals
import report_ep
import report_plot
import report_tables as tables

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- made by bench/report.py: {} -->", "<!-- end -->"
BLOCKS = {
    "README.md": {"headline": lambda r: tables.headline(r) + report_ep.ep_headline(r),
                  "seven layers": tables.seven_layers},
    "bench/README.md": {"GPU": tables.gpu_tables, "codes": tables.codes_tables,
                        "ranks": report_ep.ep_tables, "CPU": tables.cpu_tables,
                        "models": tables.model_tables},
    "bench/results/h200/NOTES.md": {"goals": lambda r: gpu_goals.summary(r.gpu)},
    "bench/results/h200/QUANTISED.md": {
        "bars": lambda r: quantised_goals.gpu_summary(r.results / "h200/quantised.json")},
    "bench/results/xeon-icelake/NOTES.md": {
        "bars": lambda r: quantised_goals.cpu_summary(r.results / "xeon-icelake")},
    "bench/results/xeon-amx/NOTES.md": {
        "bars": lambda r: quantised_goals.cpu_summary(r.results / "xeon-amx")},
    "bench/results/zen4/NOTES.md": {
        "bars": lambda r: quantised_goals.cpu_summary(r.results / "zen4")},
}
ROWS = {"README.md": {report_ep.SUPPORT: report_ep.support_row}}
PLOT = "bench/results/speed.svg"


def page(root, name):
    """The page's text with each block and row made anew."""
    text = (root / name).read_text()
    results = tables.Results(ROOT, Path(name).parent)
    places = []  # what is there, what is made, what it is called
    for block, make in BLOCKS[name].items():
        begin = BEGIN.format(block)
        places.append((f"{re.escape(begin)}\n.*?{re.escape(END)}",
                       "\n".join([begin, "", *make(results), "", END]),
                       f"blocks `{block}`; one, between {begin} and {END},"))
    for begin, make in ROWS.get(name, {}).items():
        places.append((f"(?m:^){re.escape(begin)}[^\n]*", make(results), f"rows `{begin}`; one"))
    for there, made, what in places:
        text, count = re.compile(there, re.DOTALL).subn(
            lambda found, made=made: found[0] if made is None else made, text)
        if count != 1:
            sys.exit(f"{name}: {count} {what} is right")
    return text


def wanted(root):
    """{name: text} of every file that is made."""
    made = {name: page(root, name) for name in BLOCKS}
    return made | {PLOT: report_plot.svg(tables.Results(ROOT, "."))}


def stale(root):
    """Names of files in `root` that differ from what the results make."""
    return [name for name, text in wanted(root).items() if (root / name).read_text() != text]


def main():
    if "--check" in sys.argv[1:]:
        found = stale(ROOT)
        if found:
            sys.exit(f"{', '.join(found)}: not what bench/report.py makes; run it")
        return
    for name, text in wanted(ROOT).items():
        (ROOT / name).write_text(text)


if __name__ == "__main__":
    main()
