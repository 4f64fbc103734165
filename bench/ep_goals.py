# SPDX-License-Identifier: Apache-2.0
"""Rows of bench/results/<gpu>_x<N>/ep.json, as bench/gpu/ep_bench.py writes them, and what expert
parallelism on N GPUs of one host aims at, each goal beside what was measured.

    python bench/ep_goals.py bench/results/<gpu>_x<N>/ep.json
"""

import json
import pathlib
import sys

OURS = "auto"  # what a caller gets who asks for nothing
# Of two ranks; what of more is reported alone.
EFFICIENCY = {("deepseek-v3", 4096): 0.93, ("gpt-oss-120b", 4096): 0.90,
              ("qwen3-30b", 4096): 0.80, ("qwen3-30b", 16384): 0.82}
# Least tokens: times the limit; below all of them, so many us above it.
OVER_LIMIT = {"dispatch": ({4096: 1.10, 1024: 1.15}, 3.0),
              "combine": ({16384: 1.20, 4096: 1.30, 1024: 1.45}, 6.0)}
PEER_OVER_NCCL, HARDEST = 1.25, {("deepseek-v3", 16384): 1.15}
OVER_TORCH = {True: (10, 6), False: (4, 3)}  # of two ranks, of more: top-8, top-4
LOCAL_SPARE = 1.03  # a layer over its local work, beside what moves its rows
MODELLED, MODEL_ERROR = ("peer", "gather", "rows"), 0.15
FEW_TOKENS, HEADLINE_TOKENS = 1024, 4096


class EpRows:
    """Rows by (shape, tokens, op, impl)."""

    def __init__(self, file):
        self.file, self.size = file, file.get("ranks", 2)
        self.all = {tuple(row[name] for name in ("shape", "tokens", "op", "impl")): row
                    for row in file["rows"]}
        self.cases = list(dict.fromkeys(key[:2] for key in self.all))

    @classmethod
    def read(cls, path):
        return cls(json.loads(path.read_text()))

    def us(self, case, op, impl=OURS):
        row = self.all.get((*case, op, impl))
        return row and row["us"]

    def faster(self, case, op, peer, impl=OURS):
        """How many times as fast as the peer `impl` is; None where one of them is missing."""
        ours, theirs = self.us(case, op, impl), self.us(case, op, peer)
        return theirs / ours if ours and theirs else None

    def limit(self, case, op):
        row = self.all.get((*case, op, OURS))
        return row and row["limit_us"]

    def over_local(self, case, op):
        """A layer's time over 1.03 x its work without transport and what moves its rows: a pair; of
        a step two, and x once more beside d_y."""
        local, ours = self.us(case, op, "local"), self.us(case, op)
        pair, dispatch = self.us(case, "pair"), self.us(case, "dispatch")
        if not (local and ours and pair and dispatch):
            return None
        moved = pair if op == "layer_fwd" else 2 * pair + dispatch
        return ours / (LOCAL_SPARE * local + moved)

    def model_errors(self, case):
        """{(scheme, op): error} of what moec epsim says."""
        found = {}
        for scheme in MODELLED:
            for op in ("dispatch", "combine", "pair"):
                row = self.all.get((*case, op, scheme))
                if row and row.get("model_us"):
                    found[scheme, op] = row["model_us"] / row["us"] - 1
        return found

    def efficiency(self, case, op):
        """One GPU's time for the tokens of all ranks, over their number, beside the ranks' time."""
        ours, limit = self.us(case, op), self.limit(case, op)
        return limit / ours if ours and limit else None


def over_limit(rows, case, op):
    """(what, value, bound) of one way of rows beside the link's limit; None: not measured."""
    us, limit = rows.us(case, op), rows.limit(case, op)
    if not us or not limit:
        return None
    times, spare = OVER_LIMIT[op]
    for least, most in times.items():
        if case[1] >= least:
            return f"{op} over the limit", us / limit, most, True
    return f"{op} above the limit, us", us - limit, spare, True


def goals(rows, top_k_of):
    """(shape, tokens, what, measured, bound, whether at most the bound is right) of what is there.
    top_k_of: {shape: K}."""
    for case in rows.cases:
        shape, tokens = case
        many_slots, two = top_k_of.get(shape, 8) >= 8, rows.size == 2
        found = [over_limit(rows, case, op) for op in OVER_LIMIT]
        if tokens >= FEW_TOKENS:
            found.append(("pair of peer, x NCCL", rows.faster(case, "pair", "nccl", "peer"),
                          HARDEST.get(case, PEER_OVER_NCCL), False))
        over = rows.faster(case, "pair", "nccl")
        found += [("pair over NCCL's", over and 1 / over, 1.10, True),
                  ("pair, x torch", rows.faster(case, "pair", "torch"),
                   OVER_TORCH[two][not many_slots], False)]
        found += [(f"{op[6:]} over {LOCAL_SPARE} x local, and transport",
                   rows.over_local(case, op), 1, True) for op in ("layer_fwd", "layer_step")]
        errors = rows.model_errors(case).values()
        if errors and not two:  # it was made of rows of two
            found.append(("error of epsim, the worst", max(map(abs, errors)), MODEL_ERROR, True))
        if two and case in EFFICIENCY:
            found += [(f"{op[6:]} beside one GPU", rows.efficiency(case, op), EFFICIENCY[case],
                       False) for op in ("layer_fwd", "layer_step")]
        if two and tokens >= FEW_TOKENS:
            found.append(("step, x torchtitan's way",
                          rows.faster(case, "layer_step", "torchtitan"), 2, False))
        pair = rows.all.get((*case, "pair", OURS), {})
        if "host_syncs" in pair:
            found.append(("waits and allocations", pair["host_syncs"] + pair["allocs"], 0, True))
        for goal in found:
            if goal and goal[1] is not None:
                yield *case, *goal


def is_met(value, bound, at_most):
    return value <= bound if at_most else value >= bound


def summary(rows, top_k_of, only_open=False):
    """A table of all goals: met or open."""
    made = list(goals(rows, top_k_of))
    shown = [goal for goal in made if not (only_open and is_met(*goal[3:]))]
    met = sum(is_met(*goal[3:]) for goal in made)
    lines = [f"{met} of {len(made)} goals are met."]
    if not shown:
        return lines
    lines += ["", "| layer | tokens | goal | bound | measured | |", "|---|--:|---|--:|--:|---|"]
    for shape, tokens, what, value, bound, at_most in shown:
        sign = "<=" if at_most else ">="
        lines.append(f"| {shape} | {tokens} | {what} | {sign} {bound:g} | {value:.3g} "
                     f"| {'met' if is_met(value, bound, at_most) else 'open'} |")
    return lines


def main():
    rows = EpRows.read(pathlib.Path(sys.argv[1]))
    print("\n".join(summary(rows, rows.file["top_k"])))


if __name__ == "__main__":
    main()
