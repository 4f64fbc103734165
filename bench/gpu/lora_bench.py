# SPDX-License-Identifier: Apache-2.0
"""A layer's experts with LoRA adapters beside the same without, merged into one file of rows.

    scripts/bench_gpu.sh lora                        every shape, 4096 and 16384 tokens
    scripts/bench_gpu.sh lora --case qwen3-30b-a3b:4096 --no-peers
    python3 bench/gpu/lora_bench.py --device cpu --small --out FILE    that it runs

moec.torch.Experts, frozen, in bf16 and as NF4 of bitsandbytes; adapters of rank 16 on both matrices
in bf16, compact (-lora) or as PEFT stores them (-lora-peft). fwd is plan, experts, combine; step is
the same, then d_x, d(routing weights), dA and dB. All hold the same values, and a case is measured
only when its results agree. Beside them are PyTorch's
grouped_mm with factored terms, and with W + s B A in the place of W, as PEFT adapts stacks.
over_base: beside the same base without adapters.
"""

import argparse
import datetime
import gc
import json
import os
import pathlib
import statistics
import sys
import time

import bitsandbytes.functional as bnb
import moec
import moec.torch
import torch
import torch.nn.functional as F
from implementations import grouped, swiglu
from layers import SHAPES, Shape
from problem import difference

RANK, SCALE, LIMIT = 16, 2.0, 2.5e-2
LAYERS = ("qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-120b")
SMALL = Shape(128, 64, 8, 2)
MATRICES = ("gate_up", "down")


class Wall:
    """Times where there is no GPU, in the form of clock.Clock."""

    def alternate(self, runs, window_seconds, rounds):
        times = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                begin = time.perf_counter()
                run()
                times[name].append(1e3 * (time.perf_counter() - begin))
        return {name: dict(ms=statistics.median(t), spread=round((max(t) - min(t)) / min(t), 3))
                for name, t in times.items()}


class Data:
    """Stacks in NF4 and the same values in bf16, factors, and one batch."""

    def __init__(self, shape, device):
        torch.manual_seed(7)
        self.shape, self.device = shape, device
        h, i, e, _ = shape
        self.packed, self.plain, self.factors = {}, {}, {}
        for name, (n, k) in {"gate_up": (2 * i, h), "down": (h, i)}.items():
            stack = self.normal(e, n, k, scale=k**-0.5)
            codes, state = bnb.quantize_4bit(stack, blocksize=64, quant_type="nf4")
            del stack
            self.packed[name] = moec.torch.PackedTensor.from_bnb(codes, state)
            self.plain[name] = self.packed[name].dequantise()
            a, b = self.normal(e, RANK, k, scale=k**-0.5), self.normal(e, n, RANK, scale=0.05)
            self.factors[name] = a.requires_grad_(), b.requires_grad_()

    def normal(self, *size, scale=1.0):
        return torch.empty(size, dtype=torch.bfloat16, device=self.device).normal_(0, scale)

    def batch(self, tokens):
        torch.manual_seed(1000 + tokens)
        h, _, e, k = self.shape
        logits = torch.randn(tokens, e, device=self.device)
        best, ids = torch.topk(logits + 0.3 * torch.randn(e, device=self.device), k)
        return dict(x=self.normal(tokens, h).requires_grad_(), ids=ids,
                    weights=best.softmax(-1).requires_grad_(), d_y=self.normal(tokens, h))

    def experts(self, base, adapters=""):
        """moec.torch.Experts over the values, with the factors where they are wanted: -lora or
        -lora-peft, where B [N,r E] lies rank by rank."""
        h, i, e, k = self.shape
        desc = moec.ExpertsDesc(hidden=h, inter=i, num_experts=e, top_k=k, dtype="bf16")
        packed = self.packed if base == "nf4" else None
        with torch.device("meta"):
            made = moec.torch.Experts(desc, packed=packed)
        if not packed:
            for name in MATRICES:
                made._parameters[name] = torch.nn.Parameter(self.plain[name], requires_grad=False)
        if adapters:
            made.add_adapter("lora", RANK, alpha=SCALE * RANK, dtype=torch.bfloat16)
            for name, (a, b) in self.factors.items():
                if adapters == "-lora-peft":
                    b = b.permute(1, 2, 0).contiguous().permute(2, 0, 1)
                factor = made.adapters["lora"][name]
                factor.a, factor.b = torch.nn.Parameter(a.detach()), torch.nn.Parameter(b.detach())
            leaves = [p for n in MATRICES for p in made.adapters["lora"][n].parameters()]
        else:
            leaves = []
        return (lambda p: made(p["x"], p["ids"], p["weights"])), leaves


# ---- peers
def peer(data, product):
    """The experts by PyTorch's grouped products, product(rows, name, offsets)."""
    def run(p):
        return grouped(p["x"], p["ids"], p["weights"], *MATRICES, data.shape.experts, swiglu,
                       product)
    return run, [part for name in MATRICES for part in data.factors[name]]


def factored(data):
    def product(rows, name, offsets):
        a, b = data.factors[name]
        narrow = F.grouped_mm(rows, a.transpose(1, 2), offs=offsets)
        plain = F.grouped_mm(rows, data.plain[name].transpose(1, 2), offs=offsets)
        return plain + SCALE * F.grouped_mm(narrow, b.transpose(1, 2), offs=offsets)
    return peer(data, product)


def delta(data):
    def product(rows, name, offsets):
        a, b = data.factors[name]
        whole = torch.baddbmm(data.plain[name], b, a, alpha=SCALE)
        return F.grouped_mm(rows, whole.transpose(1, 2), offs=offsets)
    return peer(data, product)


# ---- measuring
def step_of(forward, leaves, p):
    """y and the gradients that a fine-tune needs."""
    y = forward(p)
    return y, torch.autograd.grad(y, [p["x"], p["weights"], *leaves], p["d_y"])


def peak_mib(run, device):
    """Above what lies there."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


class Bench:
    def __init__(self, args):
        self.args = args
        if args.device == "cuda":
            from clock import Clock
            self.clock = Clock()
        else:
            self.clock = Wall()
        self.commit = os.environ.get("MOEC_COMMIT") or "unknown"
        self.call = datetime.datetime.now().isoformat(timespec="seconds")
        self.wrong, self.rows = 0, {}
        if args.out.exists():
            self.rows = {self.key(row): row for row in json.loads(args.out.read_text())["rows"]}

    @staticmethod
    def key(row):
        return row["shape"], row["tokens"], row["mode"], row["impl"]

    def run(self, name, all_tokens):
        data = Data(SMALL if self.args.small else SHAPES[name], self.args.device)
        cases = {f"moec-{base}{adapters}": data.experts(base, adapters)
                 for base in ("bf16", "nf4") for adapters in ("", "-lora", "-lora-peft")}
        peers = {} if self.args.no_peers else {"torch-factored": factored(data),
                                               "torch-delta": delta(data)}
        for tokens in all_tokens:
            p = data.batch(tokens)
            for mode in ("fwd", "step"):
                self.measure(name, p, mode, cases | peers, data)
            self.write()

    def measure(self, name, p, mode, cases, data):
        wanted = {False: self.results(data.experts("bf16"), p),
                  True: self.results(factored(data), p)}
        runs, extra = {}, {}
        for impl, case in cases.items():
            want = wanted["lora" in impl or impl.startswith("torch")]
            worst = max(map(difference, self.results(case, p), want))
            if not worst <= LIMIT:
                print(f"{name} {len(p['x'])} {mode}: {impl} differs by {worst:.3g}; at most "
                      f"{LIMIT} is right", flush=True)
                self.wrong += 1
                continue
            forward, leaves = case
            run = torch.no_grad()(lambda f=forward: f(p)) if mode == "fwd" else (
                lambda f=forward, l=leaves: step_of(f, l, p))
            runs[impl], extra[impl] = run, peak_mib(run, self.args.device)
        del wanted
        measured = self.clock.alternate(runs, self.args.window, self.args.rounds)
        for impl, values in measured.items():
            base = "moec-nf4" if "nf4" in impl else "moec-bf16"
            row = dict(shape=name, tokens=len(p["x"]), mode=mode, impl=impl, **values,
                       peak_mib=extra[impl], commit=self.commit, call=self.call)
            if base in measured:
                row["over_base"] = round(values["ms"] / measured[base]["ms"], 4)
            self.rows[self.key(row)] = row
            print(f"{name:14} {row['tokens']:6} {mode:5} {impl:18} {row['ms']:9.4f} ms "
                  f"{row.get('over_base', 0):7.3f} x base  {row['peak_mib']} MiB", flush=True)

    @staticmethod
    def results(case, p):
        """y, d_x and the factors' gradients of three experts. Routing weights have single numbers
        as rows, which cancel."""
        y, (d_x, _, *others) = step_of(*case, p)
        return [y.detach(), d_x, *(t[:: max(1, len(t) // 3)][:3].clone() for t in others)]

    def write(self):
        device = torch.cuda.get_device_name() if self.args.device == "cuda" else "cpu"
        head = dict(machine=f"{device}, torch {torch.__version__}", commit=self.commit,
                    command="scripts/bench_gpu.sh lora", rank=RANK)
        rows = ",\n".join(" " + json.dumps(row) for row in self.rows.values())
        self.args.out.parent.mkdir(parents=True, exist_ok=True)
        self.args.out.write_text(
            json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + rows + "\n]}\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", action="append", metavar="SHAPE:TOKENS,...",
                        help="default: everything")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a small layer in the place of each")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--window", type=float, default=0.3, help="seconds")
    parser.add_argument("--rounds", type=int, default=3, help="of windows")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    bench = Bench(args)
    for text in args.case or [f"{name}:{64 if args.small else '4096,16384'}" for name in LAYERS]:
        name, tokens = text.split(":")
        bench.run(name, [int(t) for t in tokens.split(",")])
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    print(f"written: {args.out}; {bench.wrong} wrong")
    sys.exit(bench.wrong > 0)


if __name__ == "__main__":
    main()
