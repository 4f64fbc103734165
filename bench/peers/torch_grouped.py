# SPDX-License-Identifier: Apache-2.0
"""The experts layer of PyTorch alone, as Hugging Face's default runs it: sort, gather, grouped_mm,
SwiGLU, grouped_mm, weight, inverse gather, sum.

    python3 bench/peers/torch_grouped.py --model qwen3-30b --device cuda --tokens 16 --tokens 512

times it as a forward of the whole layer, router included: the demo shows it beside `moec bench`.
"""

import argparse
import json
import pathlib
import statistics
import time

import torch
import torch.nn.functional as F

SHAPES = pathlib.Path(__file__).resolve().parents[1] / "shapes.json"


def grouped(x, ids, weights, gate_up, down):
    tokens, slots = ids.shape
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    inverse = torch.argsort(order)
    ends = torch.bincount(flat, minlength=gate_up.shape[0]).cumsum(0).to(torch.int32)
    mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
    both = mm(x[order // slots], gate_up.transpose(-2, -1), offs=ends)
    gate, up = both.chunk(2, dim=-1)
    rows = mm(F.silu(gate) * up, down.transpose(-2, -1), offs=ends)
    rows = rows * weights.reshape(-1)[order, None].to(rows.dtype)
    return rows[inverse].view(tokens, slots, -1).sum(1)


def layer(x, gate, gate_up, down, slots):
    """Softmax, the top-k of it made to sum to 1, experts."""
    weights, ids = torch.topk(torch.softmax((x @ gate.T).float(), -1), slots)
    return grouped(x, ids, weights / weights.sum(-1, keepdim=True), gate_up, down)


def seconds_of(function, device, seconds):
    """Median time of a call; each is waited for."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times, end = [], time.perf_counter() + seconds
    for index in range(10**6):
        wait()
        begin = time.perf_counter()
        function()
        wait()
        times.append(time.perf_counter() - begin)
        if index > 3 and time.perf_counter() > end:
            return statistics.median(times[2:])  # the first ones warm up


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen3-30b", help="a name of bench/shapes.json")
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--seconds", type=float, default=0.5)
    args = parser.parse_args()
    shape = next(s for s in json.loads(SHAPES.read_text()) if s["name"] == args.model)
    e, k, h, i = (shape[n] for n in ("experts", "top_k", "hidden", "inter"))
    normal = lambda *size: torch.randn(  # noqa: E731
        *size, dtype=torch.bfloat16, device=args.device) * 0.02
    gate, gate_up, down = normal(e, h), normal(e, 2 * i, h), normal(e, h, i)
    chip = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"PyTorch {torch.__version__}, grouped_mm, {args.model}, bf16, forward, {chip}")
    with torch.no_grad():
        for tokens in args.tokens or [16, 512]:
            x = normal(tokens, h)
            took = seconds_of(lambda x=x: layer(x, gate, gate_up, down, k), args.device,
                              args.seconds)
            print(f"{tokens:6d} tokens {took * 1e3:9.2f} ms")


if __name__ == "__main__":
    main()
