# SPDX-License-Identifier: Apache-2.0
"""One MoE experts layer from top-k ids and weights, moec beside PyTorch's grouped_mm: same threads,
same run.

    make bench-peers                                    every shape
    scripts/bench_peers.sh --model qwen3-30b --tokens 4096 --out bench/results/NAME/peers.json

torch_grouped is what Hugging Face's default does. The step is forward, dX, dW1, dW2 and the
routing-weight gradient, all in bf16; moec reads the trainable weights where they are, so packing
what it packs is inside the time. The two alternate, medians of the rounds. FLOPs: 6 T K H I
forward, 18 a step.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import time

import ml_dtypes
import moec
import numpy as np
import torch
from torch_grouped import grouped

ROOT = pathlib.Path(__file__).resolve().parents[2]


def bf16(tensor):
    """The tensor's memory as a NumPy array of bfloat16."""
    return tensor.detach().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)


class Case:
    """Both implementations on the same memory."""

    def __init__(self, shape, tokens, seed):
        torch.manual_seed(seed)
        e, k, h, i = (shape[n] for n in ("experts", "top_k", "hidden", "inter"))
        self.tokens, self.flops = tokens, 6 * tokens * k * h * i
        normal = lambda *size: torch.randn(*size, dtype=torch.bfloat16)  # noqa: E731
        self.x, self.d_y = normal(tokens, h), normal(tokens, h)
        self.gate_up, self.down = normal(e, 2 * i, h) * 0.02, normal(e, h, i) * 0.02
        logits = torch.randn(tokens, e)
        self.weights, self.ids = torch.topk(torch.softmax(logits, -1), k)
        self.context = moec.Context(num_threads=torch.get_num_threads())
        form = moec.WeightsDesc(
            num_experts=e, hidden=h, inter=i, gate_layout=moec.GateLayout.GATE_THEN_UP, dtype="bf16"
        )
        self.matrices = moec.WeightSet(gate_up=bf16(self.gate_up), down=bf16(self.down))
        self.bound = moec.Weights(self.context, form, self.matrices)
        self.plan = moec.Plan(
            self.context, moec.PlanDesc(max_tokens=tokens, num_experts=e, top_k=k)
        )
        desc = dict(num_experts=e, top_k=k, hidden=h, inter=i, dtype="bf16")
        self.infer = moec.Experts(self.context, moec.ExpertsDesc(**desc))
        self.train = moec.Experts(
            self.context, moec.ExpertsDesc(**desc, save=moec.Save.PREACT)
        )
        self.grads = None

    def moec_forward(self, experts=None):
        self.plan.from_topk(self.ids.numpy(), self.weights.numpy())
        return (experts or self.infer).forward(self.plan, bf16(self.x), self.bound)

    def moec_step(self):
        result = self.moec_forward(self.train)
        want = None if self.grads else ("x", "routing_weights", "expert_weights")
        self.grads = self.train.backward(result, bf16(self.d_y), want, into=self.grads)
        return result

    def torch_forward(self):
        with torch.no_grad():
            return grouped(self.x, self.ids, self.weights, self.gate_up, self.down)

    def torch_step(self):
        leaves = [self.x, self.weights, self.gate_up, self.down]
        for leaf in leaves:
            leaf.requires_grad_(True)
            leaf.grad = None
        y = grouped(self.x, self.ids, self.weights, self.gate_up, self.down)
        y.backward(self.d_y)
        for leaf in leaves:
            leaf.requires_grad_(False)
        return y


def check(case):
    """Same answer, per row, before any time is taken."""
    got = np.asarray(case.moec_forward().y, dtype=np.float32)
    ref = case.torch_forward().float().numpy()
    norms = np.linalg.norm(ref, axis=1)
    worst = (np.linalg.norm(got - ref, axis=1) / np.maximum(norms, 0.01 * norms.max())).max()
    if not worst < 2e-2:
        raise SystemExit(f"torch_layer.py: outputs differ by {worst:.3g}; less than 2e-2 is right")
    return float(worst)


def measure(functions, rounds):
    times = {name: [] for name in functions}
    for index in range(rounds + 1):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            if index:  # the first round warms up
                times[name].append(time.perf_counter() - begin)
    return times


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", action="append", help="names of bench/shapes.json")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shapes = {s["name"]: s for s in json.loads((ROOT / "bench/shapes.json").read_text())}
    rows = []
    for name in args.model or ["qwen3-30b", "olmoe-1b-7b"]:
        case = Case(shapes[name], args.tokens, seed=1)
        error = check(case)
        modes = {
            "fwd": ({"moec": case.moec_forward, "torch_grouped": case.torch_forward}, 1),
            "fwdbwd": ({"moec": case.moec_step, "torch_grouped": case.torch_step}, 3),
        }
        for mode, (functions, factor) in modes.items():
            times = measure(functions, args.rounds)
            base = statistics.median(times["torch_grouped"])
            for impl, seconds in times.items():
                median = statistics.median(seconds)
                row = dict(
                    shape=name, tokens=args.tokens, mode=mode, impl=impl, dtype="bf16",
                    ms=1e3 * median, spread=(max(seconds) - min(seconds)) / median,
                    gflops=factor * case.flops / median / 1e9, x_torch=base / median,
                    row_difference=error,
                )
                rows.append(row)
                print(f"{name:14} T={args.tokens} {mode:6} {impl:13} {row['ms']:9.1f} ms "
                      f"{row['gflops']:7.0f} GFLOP/s  {row['x_torch']:.2f} x torch", flush=True)
        del case
    if args.out:
        info = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
        cpu = names[0] if names else platform.processor()
        head = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(head, capture_output=True, text=True).stdout.strip()
        machine = dict(cpu=cpu, threads=args.threads, torch=torch.__version__,
                       isa=moec.Context().device.arch)
        command = f"make bench-peers  # --tokens {args.tokens} --rounds {args.rounds}"
        args.out.write_text(json.dumps(
            dict(machine=machine, commit=commit, command=command, rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
