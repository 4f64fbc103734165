# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face MoE model on moec, on transformers' default grouped_mm and on its eager loop: same
weights, same tokens, same threads, alternating; medians of the rounds.

    scripts/bench_peers.sh --transformers
    scripts/bench_peers.sh --transformers --out bench/results/NAME/transformers.json

The model is a Qwen3-MoE of two layers, 32 experts of 512 by 256, four per token. `prefill` is a
forward pass without gradients, `step` a forward and a backward of all parameters, `decode` one
token with a cache of 64; moec's decode is measured with weights as they are and with frozen
(packed) ones.
"""

import argparse
import copy
import json
import os
import pathlib
import platform
import statistics
import time

import moec
import moec.transformers
import torch
import transformers

PREFILL, CACHE = 256, 64


def build(dtype):
    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig(
        vocab_size=2048, hidden_size=512, intermediate_size=256, moe_intermediate_size=256,
        num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
        num_experts=32, num_experts_per_tok=4, norm_topk_prob=True,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


class Case:
    """One model, switched from implementation to implementation."""

    def __init__(self, dtype):
        self.model = build(dtype)
        self.ids = torch.randint(2048, (1, PREFILL))
        with torch.no_grad():
            self.filled = self.model(self.ids[:, :CACHE], use_cache=True).past_key_values

    def prefill(self):
        with torch.no_grad():
            return self.model(self.ids, use_cache=False).logits

    def step(self):
        self.model.zero_grad()
        self.model(self.ids, labels=self.ids, use_cache=False).loss.backward()

    def decode(self):
        with torch.no_grad():
            self.model(self.ids[:, CACHE : CACHE + 1], past_key_values=self.filled, use_cache=True)
        self.filled.crop(-1)


def measure(case, name, rounds):
    """Seconds of each round by implementation; the first round warms up."""
    times, names = {}, ["moec", "grouped_mm", "eager"]
    if name == "decode":
        names.append("moec frozen")
        frozen = copy.copy(case)
        frozen.model = copy.deepcopy(case.model)
        moec.transformers.enable(frozen.model, frozen=True)
    for index in range(rounds + 1):
        for implementation in names:
            chosen = case
            if implementation == "moec frozen":
                chosen = frozen
            else:
                case.model.set_experts_implementation(implementation)
            begin = time.perf_counter()
            getattr(chosen, name)()
            if index:
                times.setdefault(implementation, []).append(time.perf_counter() - begin)
    return times


def check(case):
    """The same logits, per token, before any time is taken."""
    case.model.set_experts_implementation("moec")
    got = case.prefill().float()
    case.model.set_experts_implementation("grouped_mm")
    want = case.prefill().float()
    error = ((got - want).norm(dim=-1) / want.norm(dim=-1)).median().item()
    if not error < 5e-2:
        raise SystemExit(f"transformers_model.py: logits differ by {error:.3g}; < 5e-2 is right")
    return error


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    case = Case(getattr(torch, args.dtype))
    error, rows = check(case), []
    for name in ("prefill", "step", "decode"):
        times = measure(case, name, args.rounds)
        base = statistics.median(times["grouped_mm"])
        for implementation, seconds in times.items():
            median = statistics.median(seconds)
            rows.append(dict(
                case=name, experts=implementation, dtype=args.dtype, ms=1e3 * median,
                spread=(max(seconds) - min(seconds)) / median, x_grouped_mm=base / median,
            ))
            print(f"{name:8} {implementation:12} {1e3 * median:9.1f} ms  "
                  f"{base / median:5.2f} x grouped_mm", flush=True)
    if args.out:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        names = [text.split(":", 1)[1].strip() for text in lines if text.startswith("model name")]
        machine = dict(cpu=names[0] if names else platform.processor(), threads=args.threads,
                       torch=torch.__version__, transformers=transformers.__version__,
                       isa=moec.Context().device.arch)
        command = f"scripts/bench_peers.sh --transformers --dtype {args.dtype}"
        args.out.write_text(json.dumps(
            dict(machine=machine, command=command, row_difference=error, rows=rows), indent=1)
            + "\n")


if __name__ == "__main__":
    main()
