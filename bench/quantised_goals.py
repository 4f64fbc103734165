# SPDX-License-Identifier: Apache-2.0
"""The speeds that quantised experts aim at, each beside what was measured.

    python bench/quantised_goals.py

Ratios of times of one call, whose implementations took turns. "/ bf16" is to own bf16, which holds
the values of that very format; "floor" is quantised_bench.py's; "x" is how many times as fast.
"""

import json
import pathlib
from collections.abc import Callable
from dataclasses import dataclass

from gpu_goals import at_least, at_most, is_met, met
from gpu_rows import STEADY

SHAPES = ("gpt-oss-20b", "gpt-oss-120b", "qwen3-30b-a3b")
FOUR, EIGHT = ("nf4", "mxfp4", "int4"), ("fp8", "int8")
NAMES = {"nf4": "NF4", "nf4-bf16": "NF4, bf16 scales", "mxfp4": "MXFP4", "int4": "INT4",
         "fp8": "FP8", "int8": "INT8"}
MEMORY = 64  # MiB of workspace beyond own bf16's


class Coded:
    """Rows of a quantised.json."""

    def __init__(self, path):
        self.file = json.loads(path.read_text())
        self.all = {(row["shape"], row["tokens"], row["mode"], row["impl"], row["beside"]): row
                    for row in self.file["rows"]}

    def row(self, shape, tokens, mode, name, impl=None):
        """Of a format, or of `impl` in turns with it; or None."""
        return self.all.get((shape, tokens, mode, impl or f"moec-{name}", f"moec-{name}"))

    def over_bf16(self, *case):
        row = self.row(*case)
        return row and row["over_bf16"]

    def over_floor(self, *case):
        row = self.row(*case)
        return row and row["ms"] / row["floor_ms"]

    def past_floor(self, *case):
        row = self.row(*case)
        return row and 1e3 * (row["ms"] - row["floor_ms"])

    def x(self, *case, others):
        """Times as fast as the fastest of `others` in the same call whose windows agree."""
        ours, rows = self.row(*case), [self.row(*case, other) for other in others]
        times = [row["ms"] for row in rows
                 if row and ours and row["call"] == ours["call"] and row["spread"] <= STEADY]
        return min(times) / ours["ms"] if times else None

    def speed_beside(self, *case, other):
        """Of `other`, x that of the format."""
        ours, row = self.row(*case), self.row(*case, other)
        return ours["ms"] / row["ms"] if ours and row else None

    def more_workspace(self, shape, name):
        """MiB more than own bf16's, where it is worst, or None."""
        cases = [key[:3] for key in self.all if key[0] == shape and key[3] == f"moec-{name}"]
        pairs = [(self.row(*case, name), self.row(*case, name, "moec-bf16")) for case in cases]
        return max((ours["workspace_mib"] - plain["workspace_mib"]
                    for ours, plain in pairs if plain), default=None)


@dataclass
class Bar:
    """limits: {format: limit}; value(rows, shape, tokens, mode, format)"""

    what: str
    mode: str
    tokens: tuple[int, ...]
    limits: dict[str, float]
    value: Callable
    goal: Callable = at_most
    shapes: tuple[str, ...] = SHAPES
    unit: tuple[str, ...] = ()


def all_of(four, eight, **other):
    return dict.fromkeys(FOUR, four) | dict.fromkeys(EIGHT, eight) | other


def portable_floor(rows, *case):
    return rows.over_floor(*case, "moec-portable")


def portable_speed(rows, *case):
    return rows.speed_beside(*case, other="moec-portable")


def stack(rows, *case):
    return rows.x(*case, others=["nf4_stack"])


def rebuilt(rows, *case):
    return rows.x(*case, others=["nf4_rec"])


def triton(rows, *case):
    return rows.x(*case, others=["triton-mxfp4", "triton-mxfp4-ids"])


NF4_X = {"gpt-oss-20b": (1.75, 1.9), "gpt-oss-120b": (3.0, 3.0), "qwen3-30b-a3b": (2.5, 2.6)}
BARS = [
    Bar("forward / bf16", "fwd", (4096, 16384),
        all_of(1.10, 1.10, int4=1.12, nf4=1.25, **{"nf4-bf16": 1.15}), Coded.over_bf16),
    Bar("step / bf16", "step", (4096, 16384), all_of(1.12, 1.12, nf4=1.25), Coded.over_bf16),
    Bar("forward / bf16, without gpt-oss-20b", "fwd", (256,), all_of(0.60, 0.65), Coded.over_bf16,
        shapes=SHAPES[1:]),
    Bar("forward / floor", "fwd", (16, 64), all_of(1.8, 1.3, mxfp4=1.5, int4=1.6),
        Coded.over_floor),
    Bar("forward - floor", "fwd", (1,), all_of(15, 15), Coded.past_floor, unit=(" us",)),
    Bar("portable: x Hopper's speed", "fwd", (4096,), all_of(0.4, 0.4), portable_speed, at_least),
    Bar("portable: forward / floor", "fwd", (1, 16, 64), all_of(2.2, 2.2), portable_floor),
    *(Bar(what, mode, (4096,), {"nf4": limits[which]}, value, at_least, (shape,))
      for which, (what, mode, value) in enumerate((("forward, x nf4_stack", "fwd", stack),
                                                   ("step, x nf4_rec", "step", rebuilt)))
      for shape, limits in NF4_X.items()),
    *(Bar("forward, x triton_kernels", "fwd", tokens, {"mxfp4": limit}, triton, at_least)
      for tokens, limit in (((1, 256, 1024), 1.5), ((16, 64), 1.15), ((4096,), 1.2))),
]


WORKSPACE = "workspace - bf16's"


def memory_goals(rows):
    for shape in SHAPES:
        for name in FOUR + EIGHT:
            more = rows.more_workspace(shape, name)
            yield ((WORKSPACE, shape, "any"), name,
                   at_most(WORKSPACE, shape, "any", more, MEMORY, " MiB"))


def goals_of(rows):
    """[((what, shape, tokens), format, goal)], a goal as gpu_goals has it"""
    return [((bar.what, shape, tokens), name,
             bar.goal(bar.what, shape, tokens, bar.value(rows, shape, tokens, bar.mode, name),
                      limit, *bar.unit))
            for bar in BARS for shape in bar.shapes for tokens in bar.tokens
            for name, limit in bar.limits.items()] + list(memory_goals(rows))


def said(goals):
    """A cell: what was measured of each layer, for which goal; bold where that is missed."""
    def measured(goal):
        *_, value, share = goal
        return "-" if share is None else value if is_met(goal) else f"**{value}**"

    limits = [goal[3] for goal in goals]
    if len(set(limits)) > 1:
        return ", ".join(f"{measured(goal)} for {goal[3]}" for goal in goals)
    return f"{', '.join(map(measured, goals))} for {limits[0]}" if goals else ""


def table(of, names):
    """Lines of Markdown, a row for each (what, tokens)."""
    cells = {}
    for (what, _, tokens), name, goal in of:
        cells.setdefault((what, tokens), {}).setdefault(name, []).append(goal)
    return [f"| | tokens | {' | '.join(NAMES[name] for name in names)} |",
            f"|---|--:|{'---|' * len(names)}",
            *(f"| {what} | {tokens} "
              f"| {' | '.join(said(found.get(name, [])) for name in names)} |"
              for (what, tokens), found in cells.items())]


def summary(goals, order):
    """How many are met, by format, and each beside its goal."""
    names = [name for name in NAMES if any(of == name for _, of, _ in goals)]
    by_name = ", ".join(
        f"{NAMES[name]} {sum(is_met(goal) for _, of, goal in goals if of == name)} of "
        f"{sum(of == name for _, of, _ in goals)}" for name in names)
    return [f"{met([goal for *_, goal in goals])}: {by_name}. A cell has {order}, as far as there "
            "are goals; bold is missed, - not measured.", "", *table(goals, names)]


def gpu_summary(path):
    return summary(goals_of(Coded(path)), ", ".join(SHAPES))


# ---- CPU: instruction sets stand where layers do above
CPU_SHAPES = {"qwen3-30b/4": "", "2880 x 2880, 8 experts": ", 2880 x 2880"}
CPU_BARS = ((1, "fwd", 2.2, 1.6), (512, "fwd", 0.95, 0.95), (2048, "fwd", 0.95, 0.95),
            (2048, "step", 0.9, 0.9))
CPU_SETS = ("amx", "avx512bf16", "avx512", "avx2")


def cpu_sets(files):
    return [isa for isa in CPU_SETS if any(file["isa"] == isa for file in files)]


def cpu_goals(files):
    """Of files of cpu_quantised: goals as goals_of has them."""
    found = {(row["shape"], file["isa"], row["tokens"], row["mode"], row["impl"]): row["x_bf16"]
             for file in files for row in file["rows"]}
    sets = cpu_sets(files)
    goals = []
    for tokens, mode, four, eight in CPU_BARS:
        for shape, behind in CPU_SHAPES.items():
            if not any(key[0] == shape and key[2:4] == (tokens, mode) for key in found):
                continue
            what = f"{'forward' if mode == 'fwd' else 'step'}, x bf16{behind}"
            goals += [((what, isa, tokens), name,
                       at_least(what, isa, tokens,
                                found.get((shape, isa, tokens, mode, f"moec-{name}")), limit))
                      for name, limit in all_of(four, eight).items() for isa in sets]
    return goals


def cpu_summary(folder):
    """Of the files of cpu_quantised in a folder."""
    files = [json.loads(path.read_text()) for path in sorted(folder.glob("cpu_quantised_*.json"))]
    return summary(cpu_goals(files), ", ".join(cpu_sets(files)))


def main():
    results = pathlib.Path(__file__).parent / "results"
    print("\n".join(gpu_summary(results / "h200/quantised.json")))
    for machine in ("xeon-icelake", "xeon-amx", "zen4"):
        print("\n".join(cpu_summary(results / machine)))


if __name__ == "__main__":
    main()
