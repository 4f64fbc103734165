# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers on experts in four bits: SFT, whose adapters it makes itself, and DPO, whose
reference is a frozen adapter "ref". Skipped where TRL is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import VOCABULARY
from packed_models import experts, load, saved
from peft import LoraConfig, get_peft_model

import moec.transformers
from moec.torch._packed import PackedTensor

pytest.importorskip("trl")
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer  # noqa: E402

STEPS = 3


def lora(*modules: str) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=list(modules),
                      target_parameters=["experts.gate_up_proj", "experts.down_proj"])


def words(count: int, seed: int) -> str:
    ids = torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{int(i)}" for i in ids)


def tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token: w3 is 3."""
    vocabulary = {f"w{i}": i for i in range(3, VOCABULARY)} | {"<pad>": 0, "<s>": 1, "</s>": 2}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>",
                                   eos_token="</s>", unk_token="</s>")


def options(folder: Path) -> dict[str, Any]:
    return {"output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 2,
            "learning_rate": 0.02, "logging_steps": 1, "report_to": [], "use_cpu": True,
            "save_strategy": "no", "disable_tqdm": True, "lr_scheduler_type": "constant",
            "bf16": True, "gradient_checkpointing": True, "seed": 0, "data_seed": 0}


def codes(model: Any) -> list[torch.Tensor]:
    return [part.clone() for module in experts(model) for value in module.parameters()
            if isinstance(value, PackedTensor) for part in value.parts.values()]


def steps(trainer: Any) -> list[dict[str, float]]:
    trainer.train()
    found = [row for row in trainer.state.log_history if "loss" in row]
    assert len(found) == STEPS and found[-1]["loss"] < found[0]["loss"]
    return found


def factors(model: Any, name: str) -> list[torch.Tensor]:
    """B of the experts of an adapter."""
    return [p.detach().clone() for n, p in model.named_parameters()
            if "experts" in n and f"lora_B.{name}" in n]


def test_supervised_steps(tmp_path: Path) -> None:
    model = load(saved(tmp_path, "qwen3_moe"))
    before = codes(model)
    data = Dataset.from_dict({"text": [words(10, 1)] * 8})
    trainer = SFTTrainer(
        model, SFTConfig(max_length=16, packing=False, **options(tmp_path)), train_dataset=data,
        processing_class=tokenizer(), peft_config=lora("q_proj"))
    steps(trainer)
    trained = factors(trainer.model, "default")
    assert len(trained) == 2 * len(experts(model)) and all(b.any() for b in trained)
    assert all(map(torch.equal, before, codes(model)))


def test_preferences_beside_a_frozen_adapter(tmp_path: Path) -> None:
    """There is no margin at first: "ref" is what "default" is before a step, whose B are not 0.
    Shown once to fail: a reference without its adapter."""
    model = get_peft_model(load(saved(tmp_path, "qwen3_moe")), lora())
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # TRL makes "default" bf16, and leaves "ref"
            if "lora_B" in name:
                parameter.data.normal_(0, 0.2)
            parameter.data = parameter.data.bfloat16().float()
    data = Dataset.from_dict({"prompt": [words(5, 2)] * 8, "chosen": [words(5, 3)] * 8,
                              "rejected": [words(5, 4)] * 8})
    trainer = DPOTrainer(model, None, DPOConfig(max_length=16, **options(tmp_path)),
                         train_dataset=data, processing_class=tokenizer())
    before = factors(trainer.model, "ref")
    assert len(before) == 2 * len(experts(model))
    margins = [row["rewards/margins"] for row in steps(trainer)]
    assert margins[0] == 0 and margins[-1] > 0
    assert all(map(torch.equal, before, factors(trainer.model, "ref")))
    trained = factors(trainer.model, "default")
    assert not any(map(torch.equal, before, trained))
