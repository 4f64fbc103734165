#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What pages say about speed, and README's plot: made from bench/results and never typed.

    python3 bench/report.py           rewrite them
    python3 bench/report.py --check   fail if one of them says something else

A page marks the place of a block by two comments, BEGIN with the block's name and END.
"""

import re
import sys
from pathlib import Path

import gpu_goals
import report_plot
import report_tables as tables

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- made by bench/report.py: {} -->", "<!-- end -->"
BLOCKS = {
    "README.md": {"headline": tables.headline, "seven layers": tables.seven_layers},
    "bench/README.md": {"GPU": tables.gpu_tables, "codes": tables.codes_tables,
                        "CPU": tables.cpu_tables, "models": tables.model_tables},
    "bench/results/h200/NOTES.md": {"goals": lambda r: gpu_goals.summary(r.gpu)},
}
PLOT = "bench/results/speed.svg"


def page(root, name):
    """The page's text with each block made anew."""
    text = (root / name).read_text()
    results = tables.Results(ROOT, Path(name).parent)
    for block, make in BLOCKS[name].items():
        begin = BEGIN.format(block)
        whole = re.compile(f"{re.escape(begin)}\n.*?{re.escape(END)}", re.DOTALL)
        made = "\n".join([begin, "", *make(results), "", END])
        text, count = whole.subn(lambda _: made, text)
        if count != 1:
            sys.exit(f"{name}: {count} blocks `{block}`; one, between {begin} and {END}, is right")
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
