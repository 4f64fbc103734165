#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a mixture-of-experts model whose experts stay in 4 bits (QLoRA): transformers loads it,
PEFT adapts it, Trainer trains it, and moec runs its experts. Beside it: the same without 4 bits and
without moec.

    python examples/qlora/finetune.py
    python examples/qlora/finetune.py --device cuda --steps 200

The base is made first: a model of a million parameters that has read half of the language reference
of Python as bytes. It then learns the other half with upper and lower case exchanged.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Trainer copies a model to all GPUs that it sees, and PEFT's adapters of experts do not survive it.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Qwen3MoeConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import moec.transformers

CONTEXT, BATCH, HELD_OUT = 64, 8, 96


def read_text() -> tuple[str, str]:
    """Python's language reference in two halves, the second with its case exchanged."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return text[: len(text) // 2], text[len(text) // 2 :].swapcase()


def cut(text: str) -> list[dict[str, Tensor]]:
    """Rows of CONTEXT bytes, in random order."""
    values = torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8).long()
    rows = values[: len(values) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows[order]]


class Times(TrainerCallback):
    """The time of each step."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._begin = math.nan

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._begin = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(1e3 * (time.perf_counter() - self._begin))


def fit(model: Any, rows: list[dict[str, Tensor]], steps: int, rate: float, to: Path) -> float:
    """Train with transformers' Trainer, which shows a progress bar; the median step, ms."""
    times = Times()
    Trainer(
        model=model, train_dataset=rows, callbacks=[times],
        args=TrainingArguments(
            output_dir=str(to), max_steps=steps, per_device_train_batch_size=BATCH,
            learning_rate=rate, lr_scheduler_type="cosine", warmup_steps=steps // 10,
            logging_steps=max(1, steps // 4), save_strategy="no", report_to=[],
            use_cpu=not on_gpu(model),
            seed=1, data_seed=1,
        ),
    ).train()
    return statistics.median(times.steps)


def on_gpu(model: Any) -> bool:
    return bool(model.device.type == "cuda")


@torch.no_grad()
def losses(model: Any, rows: list[dict[str, Tensor]]) -> list[float]:
    # Nothing here differs from eval(), in which bitsandbytes, on a CPU with bf16 instructions,
    # turns the weights of linear layers for good: they round to bf16 and pass no gradient on.
    model.train()
    batches = torch.stack([row["input_ids"] for row in rows]).to(model.device).split(BATCH)
    return [model(input_ids=ids, labels=ids).loss.item() for ids in batches]


def make_base(folder: Path, steps: int, device: str) -> None:
    """A checkpoint as published ones are: plain values."""
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, moe_intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_experts=8, num_experts_per_tok=2, max_position_embeddings=CONTEXT,
    )
    model = AutoModelForCausalLM.from_config(config, experts_implementation="moec")
    fit(model.to(device), cut(read_text()[0]), steps, 3e-3, folder / "log")
    model.save_pretrained(folder)


def load(folder: Path, packed: bool, device: str) -> Any:
    """The base in 4 bits, or as it is."""
    if not packed:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, device_map=device)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map=device, quantization_config=config)
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def fine_tune(base: Path, packed: bool, steps: int, device: str) -> dict[str, Any]:
    """Adapt a model, save its adapter, read that again; the figures of the run."""
    rows = cut(read_text()[1])
    held_out, rows = rows[:HELD_OUT], rows[HELD_OUT:]
    model = load(base, packed, device)
    stacks = moec.transformers.report(model)
    before = losses(model, held_out)
    torch.manual_seed(2)
    model = get_peft_model(model, LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"]))
    place = base / f"adapter_{packed}"
    step_ms = fit(model, rows, steps, 5e-3, place / "log")
    after = losses(model, held_out)
    model.save_pretrained(place)
    again = PeftModel.from_pretrained(load(base, packed, device), place)
    return {
        "name": "4-bit experts, moec" if packed else "plain experts, PyTorch",
        "packed": all(row.is_packed for row in stacks), "bytes": sum(row.bytes for row in stacks),
        "before": statistics.mean(before), "after": statistics.mean(after), "step_ms": step_ms,
        "noise": statistics.stdev(after) / len(after) ** 0.5,
        "again": max(abs(a - b) for a, b in zip(losses(again, held_out), after, strict=True)),
        "text": continue_text(again, "THE \"WITH\" STATEMENT "),
    }


def continue_text(model: Any, prompt: str) -> str:
    model.eval()
    ids = torch.tensor([list(prompt.encode())], device=model.device)
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                         max_new_tokens=CONTEXT - ids.shape[1], pad_token_id=0, eos_token_id=0)
    return bytes(out[0].tolist()).decode(errors="replace")


def show(results: list[dict[str, Any]]) -> None:
    table = Table()
    for heading in ("experts", "their MB", "held-out loss before", "after", "ms a step"):
        table.add_column(heading, justify="left" if heading == "experts" else "right")
    for r in results:
        table.add_row(r["name"], f"{r['bytes'] / 1e6:.2f}", f"{r['before']:.3f}",
                      f"{r['after']:.3f}", f"{r['step_ms']:.1f}")
    console = Console(width=100)
    console.print(table)
    for r in results:
        console.print(f"{r['name']}: {r['text']!r}", markup=False, highlight=False)


def wrong(results: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the two runs; nothing when all is well."""
    found = []
    for r in results:
        if not r["after"] < 0.8 * r["before"]:
            found.append(f"{r['name']}: held-out loss {r['before']:.3f}, then {r['after']:.3f}; "
                         "it should have fallen")
        if not r["again"] < 1e-4:
            found.append(f"{r['name']}: the adapter that was read again is {r['again']:.1e} off")
    packed, plain = results
    if not packed["packed"] or packed["bytes"] > 0.2 * plain["bytes"]:
        found.append(f"experts in 4 bits take {packed['bytes']} bytes, plain {plain['bytes']}")
    difference, noise = packed["after"] - plain["after"], 2 * plain["noise"]
    print(f"held-out losses differ by {difference:.4f}; twice their standard error is {noise:.4f}")
    if abs(difference) > noise:
        found.append("4-bit experts do not learn what plain ones do")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="of the fine-tune")
    parser.add_argument("--base-steps", type=int, default=150, help="of making the base")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--check", action="store_true", help="exit 1 unless both learn, and alike")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        make_base(base, args.base_steps, args.device)
        results = [fine_tune(base, packed, args.steps, args.device) for packed in (True, False)]
    show(results)
    if not args.check:
        return 0
    found = wrong(results)
    for text in found:
        print(f"finetune.py: {text}")
    print(f"{4 - len(found)} passed, {len(found)} failed")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
