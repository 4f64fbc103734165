# SPDX-License-Identifier: Apache-2.0
"""Frozen quantised experts on a GPU beside the same values in bf16, merged into one file of rows.

    scripts/bench_gpu.sh quantised                         every shape, scheme, number of tokens
    scripts/bench_gpu.sh quantised --case qwen3-30b-a3b:4096 --impl moec-int8

Modes: fwd is plan, experts, combine; step the same with pre-activations kept, then d_x and
d(routing weights). The implementations of a case take turns; moec-bf16 holds the values that the
codes stand for, moec-portable runs the scheme on the kernels that every GPU has, and
quantised_peers.py is beside them where its packages are. Up to FEW_TOKENS tokens graphs are
measured. floor_ms: the larger of the products at PEAK_FLOPS, and of the bytes that must move at the
rate of this card's own copy. A row is measured only when its results agree with moec-bf16's
and ours have the same bits twice.
"""

import argparse
import datetime
import gc
import json
import os
import pathlib
import subprocess
import sys

import moec
import torch
from clock import Clock, graph_of
from implementations import Moec
from layer_bench import FEW_TOKENS, WINDOWS
from layers import SHAPES
from problem import PEAK_FLOPS, Matrices, Problem, difference
from quantised_peers import peers_of
from schemes import SCHEMES

LIMIT, PEER_LIMIT = 1e-2, 2.5e-2  # relative difference of a row: others round elsewhere
TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
STEPS = (4096, 16384)
LAYERS = ("gpt-oss-20b", "gpt-oss-120b", "qwen3-30b-a3b")


def copy_rate():
    """Bytes read and written a second by a copy of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    to = torch.empty_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(5):
        to.copy_(source)
    begin.record()
    for _ in range(20):
        to.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return 20 * 2 * source.numel() / (begin.elapsed_time(end) / 1e3)


class Frozen(Moec):
    """Frozen weights of so many bits a value."""

    modes = ("fwd", "step")

    def __init__(self, context, shape, bound, max_tokens, bits):
        super().__init__(context, shape, bound, max_tokens)
        self.bits = bits


def floor_ms(bits, p, mode, rate):
    """Weights of so many bits of the experts hit (twice in a step), x, y, d_y and d_x."""
    h, i, _, top_k = p.shape
    times = 2 if mode == "step" else 1
    moved = times * (p.hit * 3 * h * i * bits / 8 + 2 * p.tokens * h * 2)
    return 1e3 * max(times * 6 * p.tokens * top_k * h * i / PEAK_FLOPS, moved / rate)


def portable_context():
    os.environ["MOEC_CUDA_KERNELS"] = "portable"
    try:
        return moec.Context("cuda")
    finally:
        del os.environ["MOEC_CUDA_KERNELS"]


def layers_of(name, impls, max_tokens, others):
    """{impl: Frozen}: bf16 first; each scheme beside it holds the same values. others: with the
    portable kernels and with peers."""
    matrices, context = Matrices(name), moec.Context("cuda")
    hidden, inter, experts, _ = matrices.shape
    bound = lambda context, **of: moec.Weights.of(  # noqa: E731
        context, gate_layout=moec.GateLayout.GATE_THEN_UP, dtype="bf16", hidden=hidden, inter=inter,
        num_experts=experts, **of)
    for impl in impls:
        scheme = SCHEMES[impl]
        plain = {"gate_up": matrices.w1, "down": matrices.w2}
        codes = {part: scheme.quantise(w) for part, w in plain.items()}
        held = {part: scheme.values(c, plain[part].shape) for part, c in codes.items()}
        coded = dict(scheme=scheme.scheme, **{p: c.data for p, c in codes.items()},
                     **{f"{p}_quant": c.quant for p, c in codes.items()})
        layer = lambda context, of, bits: Frozen(  # noqa: E731
            context, matrices.shape, bound(context, **of), max_tokens, bits)
        layers = {"moec-bf16": layer(context, held, 16), impl: layer(context, coded, scheme.bits)}
        if others:
            layers["moec-portable"] = layer(portable_context(), coded, scheme.bits)
            layers |= peers_of(impl, codes, {p: w.shape for p, w in plain.items()}, held)
        yield impl, layers, matrices
        del codes, held, coded, layer, layers
        gc.collect()
        torch.cuda.empty_cache()


class Bench:
    def __init__(self, args):
        self.args, self.clock, self.rate = args, Clock(), copy_rate()
        self.commit = os.environ.get("MOEC_COMMIT") or "unknown"
        self.call = datetime.datetime.now().isoformat(timespec="seconds")
        self.rows, self.wrong = {}, 0
        if args.out.exists():
            for row in json.loads(args.out.read_text())["rows"]:
                self.rows[self.key(row)] = row
        print(f"copy: {self.rate / 1e12:.2f} TB/s", flush=True)

    @staticmethod
    def key(row):
        return (list(SHAPES).index(row["shape"]), row["mode"], row["tokens"], row["impl"],
                row["beside"])

    def compare(self, p, mode, impl, layers):
        runs, cases, wanted = {}, {}, None
        for name, layer in layers.items():
            if mode not in layer.modes:
                continue
            case = cases[name] = layer.case(p, mode)  # kept: a graph does not hold its tensors
            case.run()
            got = {part: r.float().clone() for part, r in case.results().items()}
            wanted = wanted or got
            own = layer.wanted(p) if hasattr(layer, "wanted") else wanted
            ours = name in ("moec-bf16", impl)
            limit = LIMIT if ours else PEER_LIMIT
            worst = max(difference(got[part], own[part]) for part in got
                        if ours or part != "d_weights")
            if not worst <= limit:
                print(f"{p.name} {p.tokens} {mode}: {name} differs from bf16 by {worst:.3g}; "
                      f"at most {limit} is right", flush=True)
                self.wrong += 1
                continue
            case.run()
            if ours and any(not torch.equal(got[part], r.float())
                            for part, r in case.results().items()):
                print(f"{p.name} {p.tokens} {mode}: {name} has other bits the second time",
                      flush=True)
                self.wrong += 1
                continue
            runs[name] = graph_of(case.run) if p.tokens <= FEW_TOKENS else case.run
        _, seconds, rounds = next(kind for kind in WINDOWS if p.tokens <= kind[0])
        measured = self.clock.alternate(runs, self.args.window or seconds,
                                        self.args.rounds or rounds)
        base = measured["moec-bf16"]["ms"]
        for name, values in measured.items():
            floor, work = floor_ms(layers[name].bits, p, mode, self.rate), cases[name].workspace_mib
            row = dict(shape=p.name, tokens=p.tokens, mode=mode, impl=name, beside=impl, **values,
                       floor_ms=round(floor, 5), workspace_mib=work and round(work, 1),
                       over_bf16=round(values["ms"] / base, 4), commit=self.commit, call=self.call)
            self.rows[self.key(row)] = row
            print(f"{p.name:14} {p.tokens:6} {mode:5} {name:13} {row['ms']:9.4f} ms "
                  f"{row['ms'] / floor:6.2f} x floor {row['over_bf16']:7.3f} x bf16", flush=True)

    def run(self, name, all_tokens):
        for impl, layers, matrices in layers_of(name, self.args.impl, max(all_tokens),
                                                not self.args.no_others):
            for tokens in all_tokens:
                p = Problem(matrices, tokens)
                for mode in ("fwd", "step") if tokens in STEPS else ("fwd",):
                    self.compare(p, mode, impl, layers)
                self.write()

    def write(self):
        device = torch.cuda.get_device_properties(0)
        head = dict(machine=f"{device.name}, torch {torch.__version__}", commit=self.commit,
                    command="scripts/bench_gpu.sh quantised",
                    copy_tb_per_s=round(self.rate / 1e12, 3))
        rows = ",\n".join(" " + json.dumps(self.rows[key]) for key in sorted(self.rows))
        self.args.out.parent.mkdir(parents=True, exist_ok=True)
        self.args.out.write_text(json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + rows +
                                 "\n]}\n")


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", action="append", metavar="SHAPE:TOKENS,...",
                        help="default: everything")
    parser.add_argument("--impl", type=lambda text: text.split(","), default=list(SCHEMES),
                        help=f"of {', '.join(SCHEMES)}")
    parser.add_argument("--no-others", action="store_true", help="no portable kernels, no peers")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--window", type=float, help="seconds; default: layer_bench.WINDOWS")
    parser.add_argument("--rounds", type=int, help="of windows; default: layer_bench.WINDOWS")
    args = parser.parse_args()
    unknown = set(args.impl) - set(SCHEMES)
    if unknown:
        parser.error(f"--impl {unknown.pop()}: one of {', '.join(SCHEMES)} is needed")
    return args


def main():
    args = arguments()
    bench = Bench(args)
    for text in args.case or [f"{name}:{','.join(map(str, TOKENS))}" for name in LAYERS]:
        name, tokens = text.split(":")
        bench.run(name, [int(t) for t in tokens.split(",")])
    print(f"written: {args.out}; {bench.wrong} wrong")
    sys.exit(bench.wrong > 0)


if __name__ == "__main__":
    main()
