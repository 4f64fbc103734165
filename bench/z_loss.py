#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The router's z loss, value and gradient, beside the same in PyTorch: mean of logsumexp squared.

    python bench/z_loss.py --device cpu --threads 2
    python bench/z_loss.py --device cuda --json FILE

The two take turns; a row is the median of the turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import moec
import torch

TOKENS, TURNS, CALLS = 60_000, 9, 20


def ms(call: Callable[[], object], device: str) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin) / CALLS


def row(context: moec.Context, experts: int, device: str) -> dict[str, float]:
    logits = torch.randn(TOKENS, experts, device=device)
    leaf = logits.clone().requires_grad_()
    loss = moec.Loss(kind=moec.LossKind.Z)
    d_logits = [torch.zeros_like(logits)]

    def ours() -> torch.Tensor:
        value = loss(context, logits)
        d_logits[0].zero_()
        loss.backward(context, logits, out=d_logits)
        return torch.as_tensor(value)

    def theirs() -> torch.Tensor:
        leaf.grad = None
        value = leaf.logsumexp(-1).square().mean()
        value.backward()
        return value.detach()

    torch.testing.assert_close(ours().reshape(()).to(device), theirs(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(d_logits[0], leaf.grad, rtol=1e-4, atol=1e-9)
    for call in (ours, theirs):
        ms(call, device)
    times = [(ms(ours, device), ms(theirs, device)) for _ in range(TURNS)]
    moec_ms, torch_ms = (statistics.median(t) for t in zip(*times, strict=True))
    return {"experts": experts, "moec_ms": moec_ms, "torch_ms": torch_ms,
            "torch_over_moec": torch_ms / moec_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; 0: all")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    with moec.Context(args.device, num_threads=args.threads) as context:
        rows = [row(context, experts, args.device) for experts in (8, 64, 128)]
        found = {"machine": context.device.name, "torch": torch.__version__, "tokens": TOKENS,
                 "rows": rows}
    for r in rows:
        print(f"{TOKENS} tokens, {r['experts']:3d} experts: moec {r['moec_ms']:.3f} ms, "
              f"PyTorch {r['torch_ms']:.3f} ms, {r['torch_over_moec']:.2f} x")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
