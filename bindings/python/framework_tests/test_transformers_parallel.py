# SPDX-License-Identifier: Apache-2.0
"""transformers' expert parallelism, ep_implementation="moec": processes of gloo, or one for each of
2, 4 or 8 GPUs, against one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

if not find_spec("transformers.distributed.expert_parallel"):
    pytest.skip("transformers before 5.23", allow_module_level=True)

import transformers_worker as worker

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
MOST = max(size for size in (2, 4, 8) if size <= max(2, torch.cuda.device_count()))


@pytest.mark.parametrize(("device", "scheme", "size"), [
    ("cpu", "AUTO", 2), ("cpu", "GATHER", 4),
    pytest.param("cuda", "AUTO", MOST, marks=[pytest.mark.gpu, TWO_GPUS]),
])
def test_a_model_loads_its_experts_trains_and_is_saved(
    device: str, scheme: str, size: int, tmp_path: Path
) -> None:
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=24,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        num_experts=worker.EXPERTS, num_experts_per_tok=2, norm_topk_prob=True,
        decoder_sparse_step=1,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    run_ranks(worker.main, size, tmp_path, device, scheme)
    one = AutoModelForCausalLM.from_pretrained(tmp_path / "model", experts_implementation="moec")
    want = worker.train(one.to(device), worker.tokens(0, 1).to(device), 1)
    assert torch.load(tmp_path / "losses.pt") == pytest.approx(want, rel=1e-4)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    for (name, have), (_, expected) in zip(
        trained.named_parameters(), one.named_parameters(), strict=True
    ):
        torch.testing.assert_close(have, expected.cpu(), rtol=1e-3, atol=1e-4, msg=name)
