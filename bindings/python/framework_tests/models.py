# SPDX-License-Identifier: Apache-2.0
"""Tiny random Hugging Face models of nine families, every parameter drawn with deviation 0.2."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import moec.transformers
from moec.golden import row_error

VOCABULARY, LAYERS = 96, 2
HERE = os.environ.get("MOEC_TEST_DEVICE", "cpu")  # where tests of one device run
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}
_ROUTED: dict[str, Any] = {
    "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0,
    "norm_topk_prob": True, "routed_scaling_factor": 1.5,
}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
           "v_head_dim": 8, "num_key_value_heads": 4}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", {
        "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3,
        "norm_topk_prob": True}),
    "gpt_oss": ("GptOssConfig", {
        "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"]}),
    "deepseek_v3": ("DeepseekV3Config", _ROUTED | _LATENT),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "glm4_moe": ("Glm4MoeConfig", _ROUTED),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", {
        "moe_intermediate_size": 24, "moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0, "moe_layer_end_index": -1, "moe_layer_interval": 1}),
    "dots1": ("Dots1Config", _ROUTED | {"layer_types": ["full_attention"] * LAYERS}),
    "lfm2_moe": ("Lfm2MoeConfig", {
        "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3,
        "num_dense_layers": 0, "layer_types": ["full_attention"] * LAYERS}),
    "llama4": ("Llama4TextConfig", {
        "num_local_experts": 8, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 40, "attention_chunk_size": 64, "use_qk_norm": False,
        "layer_types": ["chunked_attention", "full_attention"]}),
}


# Sizes that the CUDA backend's fast kernels take; with enough tokens for them.
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 128, "moe_intermediate_size": 128}


def build(
    family: str, implementation: str | None = "eager", seed: int = 0, device: str = HERE,
    sizes: dict[str, Any] | None = None,
) -> Any:
    """A model of a family; None leaves transformers' default."""
    name, own = CONFIGS[family]
    config = getattr(transformers, name)(**(_COMMON | own | (sizes or {})))
    options = {} if implementation is None else {"experts_implementation": implementation}
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", **options
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and "inv_freq" not in name:
                tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
    return model.eval().to(device)


def tokens(
    batch: int = 2, length: int = 9, seed: int = 3, device: str = HERE
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator).to(device)


def block_of(experts: nn.Module, model: nn.Module) -> nn.Module:
    """What is compared: the experts module, for Llama-4 the block around it."""
    for module in model.modules():
        if type(module).__name__ == "Llama4TextMoe" and module.experts is experts:
            return module
    return experts


class CallCount(TorchDispatchMode):
    """Counts the calls of moec's experts operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None
                           ) -> Any:
        self.calls += function is torch.ops.moec.experts.default
        return function(*args, **(kwargs or {}))


def record(model: nn.Module, blocks: list[nn.Module], ids: torch.Tensor) -> list[list[Any]]:
    """For each block its inputs and the gradient of its output, in one forward and backward."""
    seen: list[list[Any]] = [[] for _ in blocks]

    def hook(index: int) -> Callable[..., None]:
        def keep(_: nn.Module, inputs: Any, output: Any) -> None:
            y = output[0] if isinstance(output, tuple) else output
            seen[index] = [tuple(t.detach().clone() for t in inputs), None]
            y.register_hook(lambda g: seen[index].__setitem__(1, g.detach().clone()))
        return keep

    handles = [b.register_forward_hook(hook(i)) for i, b in enumerate(blocks)]
    logits = model(ids).logits.float()
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(logits.shape, generator=generator).to(logits.device)
    (logits * weights).sum().backward()
    for handle in handles:
        handle.remove()
    return seen


def results(block: nn.Module, inputs: Any, d_y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and every gradient of one block on recorded inputs."""
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    block.zero_grad()
    output = block(*leaves)
    y = output[0] if isinstance(output, tuple) else output
    y.backward(d_y.reshape(y.shape))
    found = {"y": y.detach()}
    found |= {f"input {i}": t.grad for i, t in enumerate(leaves) if t.grad is not None}
    found |= {n: p.grad.clone() for n, p in block.named_parameters() if p.grad is not None}
    return found


def worst(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest error of a row, and where it is."""
    assert got.keys() == want.keys()
    rows = {n: [t.float().cpu().numpy() for t in (got[n], want[n])] for n in want}
    errors = {n: row_error(*pair) for n, pair in rows.items()}
    name = max(errors, key=errors.__getitem__)
    return errors[name], name


def switch(model: Any, blocks: list[nn.Module], implementation: str) -> None:
    """eager or moec, for the model's blocks."""
    if implementation == "moec":
        moec.transformers.enable(model)
        return
    for block in blocks:
        for module in block.modules():
            module.__dict__.pop("forward", None)  # Llama-4's
    model.config._experts_implementation_internal = implementation
