#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""LoRA steps on gpt-oss-120b at its true size on one GPU, in 71 GiB: experts stay in the 4 bits of
their checkpoint (MXFP4), and every expert of every layer has adapters of rank 16.

    python examples/qlora_120b/train.py
    python examples/qlora_120b/train.py --tiny --device cpu --check

The weights are random and are made on the device, so that nothing is downloaded. What makes it fit:
packed experts, which no step makes plain; adapters in bf16, whose optimiser runs inside the
backward and frees each gradient at once; checkpointing of each layer; a loss in chunks of tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig

import moec.transformers
from moec.torch import PackedTensor, Store

FULL: dict[str, Any] = {
    "num_hidden_layers": 36, "num_local_experts": 128, "num_experts_per_tok": 4,
    "hidden_size": 2880, "intermediate_size": 2880, "vocab_size": 201088,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
}
TINY: dict[str, Any] = {
    "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    "hidden_size": 64, "intermediate_size": 96, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}
GIB = 1 << 30
SCALES = (119, 122)  # exponents of the blocks' scales, of deviations near 0.02


def packed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A random stack [E,in,out] of gpt-oss's MXFP4: the codes lie along `in`."""
    count, inner, outer = shape
    blocks = (count, outer, inner // 32)
    parts = {
        "_blocks": torch.randint(256, (*blocks, 16), dtype=torch.uint8, device=device),
        "_scales": torch.randint(*SCALES, blocks, dtype=torch.uint8, device=device),
    }
    store = Store("mxfp4", count, turned=True)
    return nn.Parameter(PackedTensor(parts, store, shape, dtype), requires_grad=False)


def build(config: GptOssConfig, device: torch.device) -> Any:
    """The model in bf16 but for its experts; a plain stack is never made."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation="moec")
    for module in model.modules():
        for name, held in module._parameters.items():
            if held is None:
                continue
            if held.dim() == 3:
                module._parameters[name] = packed(tuple(held.shape), held.dtype, device)
                continue
            made = torch.empty(held.shape, dtype=held.dtype, device=device)
            is_scale = held.dim() == 1 and "Norm" in type(module).__name__
            made = made.fill_(1) if is_scale else made.normal_(0, 0.02)
            module._parameters[name] = nn.Parameter(made, requires_grad=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    return model


class Adam:
    """AdamW of one parameter after the other, as soon as its gradient is there. Moments are kept
    in `dtype`; a step is computed in fp32, and what is stored in bf16 is rounded at random, so that
    steps smaller than a rounding add up."""

    def __init__(self, parameters: list[nn.Parameter], rate: float, dtype: torch.dtype) -> None:
        self.rate, self.dtype, self.step = rate, dtype, 0
        self.largest: dict[nn.Parameter, Tensor] = {}
        """of each gradient of the last step"""
        self._moments = {p: [torch.zeros_like(p, dtype=dtype) for _ in range(2)]
                         for p in parameters}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._update)

    def begin(self) -> None:
        self.step += 1
        self.largest.clear()

    @torch.no_grad()
    def _update(self, parameter: Any) -> None:
        gradient = parameter.grad.float()
        self.largest[parameter] = gradient.abs().max()
        first, second = self._moments[parameter]
        m = first.float().lerp_(gradient, 0.1)
        v = second.float().lerp_(gradient.square_(), 0.001)
        first.copy_(_rounded(m, first.dtype))
        second.copy_(_rounded(v, second.dtype))
        v.div_(1 - 0.999**self.step).sqrt_().add_(1e-8)
        new = parameter.float().addcdiv_(m, v, value=-self.rate / (1 - 0.9**self.step))
        parameter.copy_(_rounded(new, parameter.dtype))
        parameter.grad = None


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Up or down, with the probability of being nearer."""
    if dtype != torch.bfloat16:
        return value.to(dtype)
    bits = value.view(torch.int32)
    noise = torch.randint_like(bits, 1 << 16)
    return ((bits + noise) & -(1 << 16)).view(torch.float32).to(dtype)


def backward(model: Any, ids: Tensor, chunk: int) -> Tensor:
    """The loss of the next token. Logits exist for `chunk` tokens at a time."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    leaf = hidden[:, :-1].flatten(0, 1).detach().requires_grad_()
    wanted = ids[:, 1:].flatten()
    total = torch.zeros((), device=ids.device)
    for begin in range(0, len(leaf), chunk):
        logits = model.lm_head(leaf[begin : begin + chunk]).float()
        loss = F.cross_entropy(logits, wanted[begin : begin + chunk], reduction="sum") / len(wanted)
        loss.backward()
        total += loss.detach()
    hidden[:, :-1].flatten(0, 1).backward(leaf.grad)
    return total


def on_gpu(device: torch.device, fn: Callable[[], Any]) -> Any:
    return fn() if device.type == "cuda" else None


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Take the steps, print each, and return the figures of the run."""
    device = torch.device(args.device)
    torch.manual_seed(1)
    config = GptOssConfig(**(TINY if args.tiny else FULL), use_cache=False)
    begin = time.perf_counter()
    base = build(config, device)
    report = moec.transformers.report(base)
    print(str(report).splitlines()[-1], flush=True)
    ids = torch.randint(3, config.vocab_size, (args.batch, args.length), device=device)
    plain = loss_of_plain(base, ids) if args.check else None
    with device:
        model = get_peft_model(base, LoraConfig(
            r=args.rank, lora_alpha=2 * args.rank, target_modules=["q_proj", "v_proj"],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        ), autocast_adapter_dtype=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.to(torch.bfloat16)  # whatever PEFT made of them
    adam = Adam(trained, args.rate, getattr(torch, args.moments))
    base.gradient_checkpointing_enable({"use_reentrant": False})
    base.train()
    print(f"built in {time.perf_counter() - begin:.1f} s; {sum(p.numel() for p in trained):,} "
          f"trained values in bfloat16, moments in {args.moments}", flush=True)
    on_gpu(device, torch.cuda.reset_peak_memory_stats)
    losses, seconds, free = [], [], []
    for step in range(args.steps):
        adam.begin()
        began = time.perf_counter()
        losses.append(backward(base, ids, args.chunk).item())
        on_gpu(device, torch.cuda.synchronize)
        seconds.append(time.perf_counter() - began)
        free.append(on_gpu(device, lambda: torch.cuda.mem_get_info()[0]))
        print(f"step {step + 1}: loss {losses[-1]:.4f}, {seconds[-1]:.3f} s, "
              f"{ids.numel() / seconds[-1]:.0f} tokens/s", flush=True)
    counted = sorted(seconds[1:] or seconds)
    used = counted[len(counted) // 2]
    return {
        "model": "tiny" if args.tiny else "gpt-oss-120b", "device": on_gpu(
            device, torch.cuda.get_device_name) or "cpu",
        "torch": torch.__version__, "rank": args.rank, "batch": args.batch, "length": args.length,
        "moments": args.moments, "steps": args.steps, "losses": losses, "step_s": used,
        "tokens_per_s": ids.numel() / used, "packed_bytes": sum(row.bytes for row in report),
        "all_packed": all(row.is_packed for row in report), "plain_loss": plain,
        "without_gradient": sum(p not in adam.largest or not adam.largest[p] > 0 for p in trained),
        "peak_allocated_gib": on_gpu(device, lambda: torch.cuda.max_memory_allocated() / GIB),
        "peak_reserved_gib": on_gpu(device, lambda: torch.cuda.max_memory_reserved() / GIB),
        "least_free_gib": on_gpu(device, lambda: min(free) / GIB),
    }


@torch.no_grad()
def loss_of_plain(base: Any, ids: Tensor) -> float:
    """The loss of the same values in plain experts on transformers' own code."""
    twin = build(copy.deepcopy(base.config), ids.device)
    for own, other in zip(base.modules(), twin.modules(), strict=True):
        for name, held in own._parameters.items():
            plain = held.dequantise() if isinstance(held, PackedTensor) else held
            other._parameters[name] = None if plain is None else nn.Parameter(plain)
    twin.config._experts_implementation_internal = "eager"
    return float(twin(input_ids=ids, labels=ids).loss)


def wrong(found: dict[str, Any]) -> list[str]:
    """What is wrong with a run of the tiny model; nothing when all is well."""
    said = []
    losses = found["losses"]
    if not losses[-1] < losses[0] - 0.01:
        said.append(f"the loss went from {losses[0]:.4f} to {losses[-1]:.4f}; it should fall")
    if abs(losses[0] - found["plain_loss"]) > 0.01:
        said.append(f"the first loss is {losses[0]:.4f}; plain experts: {found['plain_loss']:.4f}")
    if not found["all_packed"]:
        said.append("a stack of experts is plain")
    if found["without_gradient"]:
        said.append(f"{found['without_gradient']} adapters had no gradient in the last step")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a model of 2 small layers")
    parser.add_argument("--check", action="store_true", help="exit 1 if something is wrong")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--moments", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--chunk", type=int, default=256, help="tokens that have logits at a time")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    found = measure(args)
    for name in ("peak_allocated_gib", "peak_reserved_gib", "least_free_gib"):
        if found[name] is not None:
            print(f"{name}: {found[name]:.2f}")
    print(f"{found['step_s']:.3f} s a step, {found['tokens_per_s']:.0f} tokens/s")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    said = wrong(found) if args.check else []
    for text in said:
        print(f"train.py: {text}")
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main())
