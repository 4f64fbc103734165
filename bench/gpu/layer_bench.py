# SPDX-License-Identifier: Apache-2.0
"""The experts layer on a GPU, moec beside its peers, merged into one file of rows.

    make bench-gpu                                     every shape and number of tokens
    scripts/bench_gpu.sh --case olmoe:4096,16384:fwdbwd --impl moec,sonicmoe

Rows are merged by (shape, tokens, mode, impl, launch). `beside` holds the times of everybody who
took turns with a row: ratios are to be taken there, since clocks differ between calls.
Modes: fwd, fwdbwd (implementations.py); plan: mean of 20 in one graph; first_call: wall time of a
step at a number of tokens that a warm context has not seen (the worst of five), beside the steady
time. A row is measured only when its results agree with PyTorch's. Of two names, I2880/I3072, the
first's time for a FLOP is set beside the second's: modes tail_fwd, tail_fwdbwd.
"""

import argparse
import datetime
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import torch
from clock import Clock, graph_of
from implementations import PEERS, Moec, reference, sonic_plan
from layers import LAYERS, SHAPES, TAILS
from problem import Matrices, Problem, difference

ROOT = pathlib.Path(__file__).resolve().parents[2]
FEW_TOKENS = 1024  # up to here graphs are measured, too
# (tokens up to which, seconds of a window, rounds). More tokens heat the chip, and the power limit
# acts slowly: windows of 0.5 s lie 3 % apart (median of 38 rows) where those of 1.5 s lie 0.4 (23).
WINDOWS = (256, 0.1, 5), (FEW_TOKENS, 0.5, 5), (float("inf"), 1.5, 3)
PLANS = 20
LIMIT = 2.5e-2  # relative difference of a row from PyTorch's


def sampled(results):
    """Everything but the weight gradients' size: three experts of those."""
    out = {}
    for name, value in results.items():
        if name in ("d_w1", "d_w2"):
            value = value[:: max(1, value.shape[0] // 3)][:3]
        out[name] = value.detach().clone()
    return out


class Wrong(Exception):
    """Results that are not PyTorch's."""


def checked(name, case, want):
    case.run()
    worst = 0.0
    for key, value in sampled(case.results()).items():
        error = difference(value, want[key])
        if not error <= LIMIT:
            raise Wrong(f"{name}'s {key} differs from PyTorch's by {error:.3g}; "
                        f"at most {LIMIT} is right")
        worst = max(worst, error)
    return worst


class Bench:
    def __init__(self, args):
        self.args, self.clock = args, Clock()
        self.commit = os.environ.get("MOEC_COMMIT") or subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
        self.rows, self.absent = {}, 0
        if args.out.exists():
            for row in json.loads(args.out.read_text())["rows"]:
                self.rows[self.key(row)] = row
        self.call = datetime.datetime.now().isoformat(timespec="seconds")

    @staticmethod
    def key(row):
        names = list(SHAPES)
        return (names.index(row["shape"]), row["mode"], row["tokens"], row["impl"], row["launch"])

    def add(self, p, mode, impl, launch, values):
        floor = p.floor_ms(mode) if mode in ("fwd", "fwdbwd") else None
        row = dict(shape=p.name, tokens=p.tokens, mode=mode, impl=impl, launch=launch, **values,
                   experts_hit=p.hit, commit=self.commit, call=self.call)
        ratio = ""
        if floor:
            row |= dict(floor_ms=round(floor, 5), tflops=round(p.flops(mode) / row["ms"] / 1e9, 1))
            ratio = f"{row['ms'] / floor:6.2f} x floor {row['tflops']:7.1f} TFLOP/s"
        self.rows[self.key(row)] = row
        print(f"{p.name:14} {p.tokens:6} {mode:10} {impl:16} {launch:5} {row['ms']:10.4f} ms "
              f"{ratio} {row.get('sm_mhz', '')}", flush=True)

    def write(self):
        device = torch.cuda.get_device_properties(0)
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True).stdout.strip()
        head = dict(machine=f"{device.name}, driver {driver}, torch {torch.__version__}",
                    commit=self.commit, command="make bench-gpu")
        rows = ",\n".join(" " + json.dumps(self.rows[key]) for key in sorted(self.rows))
        text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + rows + "\n]}\n"
        self.args.out.parent.mkdir(parents=True, exist_ok=True)
        self.args.out.write_text(text)

    def cases(self, p, mode, layer, impls):
        """{impl: Case} of what can run here, each checked against PyTorch."""
        want = None
        if not self.args.no_check:
            case = reference(p, mode)
            case.run()
            want = sampled(case.results())
            del case
        made = {}
        for impl in impls:
            if impl == "sonicmoe" and p.tokens <= FEW_TOKENS:
                continue
            if impl == "hf_eager" and (p.name, p.tokens) != ("qwen3-30b-a3b", 4096):
                continue
            try:
                case = layer.case(p, mode) if impl == "moec" else PEERS[impl](p, mode)
                if case is None:
                    continue
                case.run()
                torch.cuda.synchronize()
                if want and case.results:
                    case.error = checked(impl, case, want)
            except Exception as error:  # whatever ails one of them, the others are measured
                print(f"{p.name} {p.tokens} {mode}: no {impl}: {error!s:.300}", flush=True)
                self.absent += 1
                continue
            made[impl] = case
        return made

    def windows(self, tokens):
        """(seconds of a window, rounds)"""
        _, seconds, rounds = next(kind for kind in WINDOWS if tokens <= kind[0])
        return self.args.window or seconds, self.args.rounds or rounds

    def compare(self, p, mode, layer):
        cases = self.cases(p, mode, layer, self.args.impl)
        few = p.tokens <= FEW_TOKENS
        runs = {}
        for impl, case in cases.items():
            if not few or impl != "cublas_bmm_bound":
                runs[impl, "eager"] = case.run
            if few and case.can_capture:
                runs[impl, "graph"] = graph_of(case.run)
        if not runs:
            return
        measured = self.clock.alternate(runs, *self.windows(p.tokens))
        beside = {"/".join(name): values["ms"] for name, values in measured.items()}
        for (impl, launch), values in measured.items():
            case = cases[impl]
            if case.saved_mib is not None:
                values["saved_mib"] = round(case.saved_mib, 1)
            if case.error is not None:
                values["difference"] = round(case.error, 5)
            self.add(p, mode, impl, launch, values | {"beside": beside})

    def plans(self, p, layer):
        def many(build):
            return graph_of(lambda: [build() for _ in range(PLANS)])

        runs = {"moec": many(lambda: layer.build_plan(p))}
        if "sonicmoe" in self.args.impl:
            runs["sonicmoe"] = many(lambda: sonic_plan(p))
        measured = self.clock.alternate(runs, *self.windows(0))
        for impl, values in measured.items():
            values["ms"] = round(values["ms"] / PLANS, 6)
            self.add(p, "plan", impl, "graph", values)

    def first_calls(self, matrices, tokens, layer):
        def wall(case):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            case.run()
            torch.cuda.synchronize()
            return 1e3 * (time.perf_counter() - begin)

        for mode in ("fwd", "fwdbwd"):
            warm = layer.case(Problem(matrices, tokens), mode)
            for _ in range(20):
                wall(warm)
            worst = None
            for new in (tokens - 37 * n for n in range(1, 6)):
                p = Problem(matrices, new)
                case = layer.case(p, mode)
                first = wall(case)
                steady = statistics.median(wall(case) for _ in range(9))
                if not worst or first / steady > worst[1] / worst[2]:
                    worst = p, first, steady
            p, first, steady = worst
            p.tokens = tokens  # the key: near this number
            self.add(p, f"first_{mode}", "moec", "eager",
                     dict(ms=round(first, 4), steady_ms=round(steady, 4)))

    def tails(self, names, tokens, modes):
        made = [(Problem(matrices, tokens), Moec.of(matrices, tokens))
                for matrices in map(Matrices, names)]
        for mode in modes:
            cases = {p.name: self.cases(p, mode, layer, ["moec"]) for p, layer in made}
            if not all(cases.values()):
                continue
            runs = {name: case["moec"].run for name, case in cases.items()}
            measured = self.clock.alternate(runs, *self.windows(tokens))
            per_flop = [measured[p.name]["ms"] / p.flops(mode) for p, _ in made]
            beside = {name: values["ms"] for name, values in measured.items()}
            over = round(per_flop[0] / per_flop[1], 4)
            self.add(made[0][0], f"tail_{mode}", "moec", "eager",
                     measured[names[0]] | dict(beside=beside, per_flop_over=over))
            self.write()

    def run(self, name, all_tokens, modes):
        if "/" in name:
            for tokens in all_tokens:
                self.tails(name.split("/"), tokens, modes)
            return
        matrices = Matrices(name)
        layer = Moec.of(matrices, max(all_tokens))
        for tokens in all_tokens:
            p = Problem(matrices, tokens)
            for mode in modes:
                if mode == "plan":
                    self.plans(p, layer)
                elif mode == "first_call":
                    self.first_calls(matrices, tokens, layer)
                else:
                    self.compare(p, mode, layer)
                gc.collect()
                self.write()
        torch.cuda.empty_cache()


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", action="append", metavar="SHAPE:TOKENS,...[:MODE,...]",
                        help="default: everything")
    split = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--mode", type=split, default=["fwd"], help="of cases that name none")
    parser.add_argument("--impl", type=split, default=["moec", "cublas_bmm_bound", "torch_grouped"],
                        help=f"of moec,{','.join(PEERS)}")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--window", type=float, help="seconds; default: by the tokens, WINDOWS")
    parser.add_argument("--rounds", type=int, help="of windows; default: by the tokens, WINDOWS")
    parser.add_argument("--no-check", action="store_true", help="results are not compared")
    args = parser.parse_args()
    unknown = set(args.impl) - {"moec", *PEERS}
    if unknown:
        parser.error(f"--impl {unknown.pop()}: one of moec, {', '.join(PEERS)} is needed")
    return args


def everything():
    """What matters most comes first."""
    long = ("qwen3-30b-a3b", "olmoe", "gpt-oss-20b", "gpt-oss-120b")
    for name in LAYERS:
        yield f"{name}:4096:fwd,fwdbwd"
    for name in long:
        yield f"{name}:16384:fwd,fwdbwd"
    for name in LAYERS:
        yield f"{name}:1,16,64,256,1024:fwd"
    for name, shape in LAYERS.items():
        plans = sorted({1, 16, 64, 256, 1024, 8192 // shape.top_k, 262144 // shape.top_k})
        yield f"{name}:{','.join(map(str, plans))}:plan"
        yield f"{name}:4096:first_call"
    for name in LAYERS:
        if name not in long:
            yield f"{name}:16384:fwd"
    for tail, whole in TAILS:
        yield f"I{tail}/I{whole}:4096:fwd,fwdbwd"


def main():
    args = arguments()
    bench = Bench(args)
    for text in args.case or everything():
        name, tokens, *modes = text.split(":")
        bench.run(name, [int(t) for t in tokens.split(",")],
                  modes[0].split(",") if modes else args.mode)
    print(f"written: {args.out}; {bench.absent} implementations absent")
    sys.exit(bench.absent > 0)


if __name__ == "__main__":
    main()
