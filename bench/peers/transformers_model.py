# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face MoE model on moec, on transformers' default grouped_mm and on its eager loop: same
weights, same tokens, same threads, alternating; medians of the rounds.

    scripts/bench_peers.sh --transformers
    scripts/bench_peers.sh --transformers --device cuda --shape qwen3-30b --layers 12 \\
        --tokens 4096 --experts moec grouped_mm --case prefill step decode generate \\
        --out bench/results/NAME/transformers.json

The model is a Qwen3-MoE of a few layers. `prefill` is a forward pass of all tokens without
gradients, `step` a forward and a backward of all parameters, `decode` one token with a cache of 64,
the mean of ten; on a CPU moec's decode is also measured with frozen (packed) weights. `generate`
is a token of generate() with a static cache, which transformers compiles into CUDA graphs; about
0.7 ms of it are its host code, whatever the experts. --out replaces the rows of the same setting
(device, shape, threads and so on), and keeps the others.
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

CACHE, DECODED, GENERATED = 64, 10, 64
LOAD = 1  # seconds
SHAPES = {
    "32x512x256": dict(hidden_size=512, moe_intermediate_size=256, num_experts=32,
                       num_experts_per_tok=4, num_attention_heads=8, num_key_value_heads=4,
                       head_dim=64),
    "qwen3-30b": dict(hidden_size=2048, moe_intermediate_size=768, num_experts=128,
                      num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4,
                      head_dim=128),
}


class Case:
    """One model, switched from implementation to implementation."""

    def __init__(self, args):
        torch.manual_seed(1)
        config = transformers.Qwen3MoeConfig(
            vocab_size=2048, intermediate_size=256, num_hidden_layers=args.layers,
            norm_topk_prob=True, **SHAPES[args.shape])
        with torch.device(args.device):
            self.model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, args.dtype)).eval()
            self.ids = torch.randint(2048, (1, args.tokens))
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
            for _ in range(DECODED):
                self.model(self.ids[:, CACHE : CACHE + 1], past_key_values=self.filled,
                           use_cache=True)
                self.filled.crop(-1)

    def generate(self, count):
        self.model.generate(self.ids[:, :CACHE], cache_implementation="static", do_sample=False,
                            max_new_tokens=count, min_new_tokens=count)
        torch.cuda.synchronize()


def measure_generate(case, names, rounds):
    """Seconds a token: those of a long run less those of a short one."""
    times = {n: [] for n in names}
    for index in range(rounds + 2):  # the first compiles, the second records
        for implementation in names:
            case.model.set_experts_implementation(implementation)
            begin = time.perf_counter()
            case.generate(2)
            middle = time.perf_counter()
            case.generate(GENERATED + 2)
            seconds = time.perf_counter() - middle - (middle - begin)
            if index > 1:
                times[implementation].append(seconds / GENERATED)
    return times, dict.fromkeys(names)


def seconds_of(case, name):
    if case.ids.is_cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    getattr(case, name)()
    if case.ids.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / (DECODED if name == "decode" else 1)


def measure(case, name, names, rounds):
    """Seconds of each round by implementation, and the largest memory on a GPU. Before that a round
    warms up, on a GPU as many as take LOAD seconds: its clock rises slowly."""
    cases = dict.fromkeys(names, case)
    if name == "decode" and not case.ids.is_cuda:
        frozen = cases["moec frozen"] = copy.copy(case)
        frozen.model = copy.deepcopy(case.model)
        moec.transformers.enable(frozen.model, frozen=True)
    times, peaks = {n: [] for n in cases}, dict.fromkeys(cases)
    warm_at = time.perf_counter() + (LOAD if case.ids.is_cuda else 0)
    warm = False
    while len(times[names[0]]) < rounds:
        for implementation, chosen in cases.items():
            if chosen is case:
                case.model.set_experts_implementation(implementation)
            if case.ids.is_cuda:
                case.model.zero_grad()
                torch.cuda.reset_peak_memory_stats()
            seconds = seconds_of(chosen, name)
            if warm:
                times[implementation].append(seconds)
            if case.ids.is_cuda:
                peaks[implementation] = torch.cuda.max_memory_allocated() >> 20
        warm = time.perf_counter() >= warm_at
    return times, peaks


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


def machine(device):
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    names = [text.split(":", 1)[1].strip() for text in lines if text.startswith("model name")]
    return dict(
        cpu=names[0] if names else platform.processor(), isa=moec.Context().device.arch,
        gpu=torch.cuda.get_device_name() if device == "cuda" else None,
        torch=torch.__version__, transformers=transformers.__version__)


def write(path, args, setting, rows):
    """Rows of this setting in place of those in the file."""
    held = json.loads(path.read_text())["rows"] if path.exists() else []
    held = [row for row in held if any(row[name] != setting[name] for name in setting)]
    asked = (f"--{name} " + (" ".join(value) if isinstance(value, list) else str(value))
             for name, value in vars(args).items() if name != "out")
    file = dict(machine=machine(args.device), commit=os.environ.get("MOEC_COMMIT"),
                command=" ".join(["scripts/bench_peers.sh --transformers", *asked]),
                rows=held + rows)
    path.write_text(json.dumps(file, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", default="32x512x256", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--experts", nargs="+", default=["moec", "grouped_mm", "eager"])
    parser.add_argument("--case", nargs="+", default=["prefill", "step", "decode"])
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    case, rows = Case(args), []
    error = check(case)
    setting = {n: getattr(args, n) for n in ("device", "shape", "layers", "tokens", "dtype",
                                             "threads")}
    for name in args.case:
        if name == "generate":
            times, peaks = measure_generate(case, args.experts, args.rounds)
        else:
            times, peaks = measure(case, name, args.experts, args.rounds)
        base = statistics.median(times["grouped_mm"])
        for implementation, seconds in times.items():
            median = statistics.median(seconds)
            rows.append(setting | dict(
                case=name, experts=implementation, ms=1e3 * median,
                spread=(max(seconds) - min(seconds)) / median, x_grouped_mm=base / median,
                peak_mib=peaks[implementation], row_difference=error,
            ))
            print(f"{name:8} {implementation:12} {1e3 * median:9.2f} ms  "
                  f"{base / median:5.2f} x grouped_mm", flush=True)
    if args.out:
        write(args.out, args, setting, rows)


if __name__ == "__main__":
    main()
