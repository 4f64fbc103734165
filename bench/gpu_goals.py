# SPDX-License-Identifier: Apache-2.0
"""The speeds that the CUDA backend aims at, each beside what was measured.

    python bench/gpu_goals.py [bench/results/h200/layer.json]

Ratios of times: to the floor (problem.py), to the cuBLAS bound and to SonicMoE, the last two only
between implementations that took turns in one call.
"""

import pathlib
import re
import statistics
import sys

from gpu_rows import Rows

SHAPES = ("gpt-oss-20b", "gpt-oss-120b", "qwen3-30b-a3b", "olmoe", "mixtral-8x7b", "sonic-30b",
          "dsv3")
FINE = {"qwen3-30b-a3b", "olmoe", "sonic-30b"}
TAILS = (2880, 3072), (1856, 1792), (704, 768)
LONG_PEER = ("qwen3-30b-a3b", "olmoe", "gpt-oss-20b", "gpt-oss-120b")
STEP_4096 = {"gpt-oss-20b": 1.15, "olmoe": 1.15, "qwen3-30b-a3b": 1.27, "sonic-30b": 1.27,
             "gpt-oss-120b": 1.45, "dsv3": 1.40, "mixtral-8x7b": 1.05}  # times as fast as SonicMoE


def at_most(what, shape, tokens, value, limit, unit=""):
    """(what, shape, tokens, goal, measured, share of the goal: at most 1 is met)"""
    goal = f"<= {limit:.3g}{unit}"
    if value is None:
        return what, shape, tokens, goal, "not measured", None
    return what, shape, tokens, goal, f"{value:.4g}{unit}", value / limit


def at_least(what, shape, tokens, value, limit):
    goal = f">= {limit:.3g}"
    if value is None:
        return what, shape, tokens, goal, "not measured", None
    return what, shape, tokens, goal, f"{value:.4g}", limit / value


def forward(rows):
    for shape in SHAPES:
        bound = lambda t: rows.over(shape, t, "fwd", "cublas_bmm_bound")  # noqa: B023, E731
        most = 1.08 if shape in FINE else 1.03
        yield at_most("forward / bound", shape, 16384, bound(16384), most)
        yield at_most("forward / bound", shape, 4096, bound(4096),
                      1.05 if shape == "mixtral-8x7b" else 1.20)
        for tokens in (4096, 16384):
            if tokens == 4096 or shape in LONG_PEER:
                yield at_most("forward / SonicMoE", shape, tokens,
                              rows.over(shape, tokens, "fwd", "sonicmoe"), 1.0)
        for tokens in (256, 1024):  # the larger of 1.20 x floor and 1.15 x bound
            row, over = rows.best(shape, tokens, "fwd"), bound(tokens)
            if row and over:
                limit = max(1.20 * row["floor_ms"], 1.15 * row["ms"] / over)
                yield at_most("forward, ms", shape, tokens, row["ms"], limit)
            else:
                yield at_most("forward, ms", shape, tokens, None, 0)
        for tokens in (16, 64):
            yield at_most("forward / floor", shape, tokens, rows.floor_ratio(shape, tokens), 1.20)
        row = rows.best(shape, 1, "fwd")
        over = row and 1e3 * (row["ms"] - row["floor_ms"])
        yield at_most("forward - floor", shape, 1, over, 15, " us")


def step_of(rows, shape, tokens):
    return rows.times_as_fast(shape, tokens, "fwdbwd", "sonicmoe")


def steps(rows):
    for shape, goal in STEP_4096.items():
        yield at_least("step, x SonicMoE", shape, 4096, step_of(rows, shape, 4096), goal)
    long = {shape: step_of(rows, shape, 16384) for shape in SHAPES}
    for shape in SHAPES:
        if shape in LONG_PEER or long[shape]:
            yield at_least("step, x SonicMoE", shape, 16384, long[shape], 1.04)
    known = [value for value in long.values() if value]
    complete = all(long[shape] for shape in LONG_PEER)
    mean = statistics.geometric_mean(known) if complete else None
    yield at_least("step, x SonicMoE", f"mean of {len(known)}", 16384, mean, 1.08)


def others(rows):
    for shape in SHAPES:
        slots = 2 if shape == "mixtral-8x7b" else 4 if "gpt-oss" in shape else 8
        for tokens in sorted({1, 16, 64, 256, 1024, 8192 // slots, 262144 // slots}):
            row = rows.best(shape, tokens, "plan")
            limit = 5 if tokens * slots <= 8192 else 12
            yield at_most("plan", shape, tokens, row and 1e3 * row["ms"], limit, " us")
        for mode in ("first_fwd", "first_fwdbwd"):
            row = rows.best(shape, 4096, mode)
            ratio = row and row["ms"] / row["steady_ms"]
            yield at_most(f"{mode} / steady", shape, 4096, ratio, 2.0)


def tails(rows):
    for tail, whole in TAILS:
        for mode in ("fwd", "fwdbwd"):
            row = rows.best(f"I{tail}", 4096, f"tail_{mode}")
            yield at_most(f"{mode}, time of a FLOP / that of I{whole}", f"I{tail}", 4096,
                          row and row["per_flop_over"], 1.05)


def goals_of(rows):
    return [*forward(rows), *steps(rows), *others(rows), *tails(rows)]


def is_met(goal):
    return goal[-1] is not None and goal[-1] <= 1


def met(goals):
    missing = sum(goal[-1] is None for goal in goals)
    return f"{sum(map(is_met, goals))} of {len(goals)} goals met, {missing} not measured"


def summary(rows):
    """Lines of Markdown: a row for each kind of goal, then every goal that is missed."""
    goals = goals_of(rows)
    kinds = {}
    for goal in goals:
        kinds.setdefault(re.sub(r"I\d+$", "a neighbour", goal[0]), []).append(goal)
    lines = [f"{met(goals)}.", "",
             "| what | tokens | goals | met | the nearest to its goal, or the furthest past it |",
             "|---|--:|--:|--:|---|"]
    for what, kind in kinds.items():
        tokens = sorted({goal[2] for goal in kind})
        _, shape, at, goal, measured, _ = max(kind, key=lambda goal: goal[-1] or 0)
        ends = " to ".join(map(str, dict.fromkeys((tokens[0], tokens[-1]))))
        lines.append(f"| {what} | {ends} | {len(kind)} | {sum(map(is_met, kind))} "
                     f"| {shape} at {at}: {measured} for {goal} |")
    lines += ["", "Missed:", ""]
    lines += [f"- {what}: {shape} at {tokens}, {measured} for {goal}"
              for what, shape, tokens, goal, measured, share in goals
              if share is not None and share > 1]
    return lines


def main():
    default = pathlib.Path(__file__).parent / "results/h200/layer.json"
    goals = goals_of(Rows(pathlib.Path(sys.argv[1]) if sys.argv[1:] else default))
    print(f"{met(goals)}\n")
    print("| what | shape | T | goal | measured | of the goal |\n|---|---|--:|--:|--:|--:|")
    for what, shape, tokens, goal, measured, share in goals:
        verdict = "" if share is None else f"{share:.2f}{'' if share <= 1 else ' missed'}"
        print(f"| {what} | {shape} | {tokens} | {goal} | {measured} | {verdict} |")


if __name__ == "__main__":
    main()
