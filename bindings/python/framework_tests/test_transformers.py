# SPDX-License-Identifier: Apache-2.0
"""moec.transformers on tiny random models of nine families, beside transformers' eager code; on
CUDA tensors with `-m gpu`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import (
    CONFIGS,
    DEVICES,
    LAYERS,
    WIDE,
    CallCount,
    block_of,
    build,
    record,
    results,
    switch,
    tokens,
    worst,
)
from torch import nn
from torch._dynamo.utils import counters

import moec.transformers

FP32, BF16 = 2e-5, 8e-3  # worst row; a rounding more of bf16 in each element


def prepared(
    family: str, device: str, sizes: dict[str, Any] | None = None, length: int = 9
) -> tuple[Any, list[nn.Module], list[list[Any]]]:
    """A model on moec, its blocks, and what they saw in an eager forward and backward."""
    model = build(family, device=device, sizes=sizes)
    blocks = [block_of(e, model) for e in moec.transformers.enable(model)]
    switch(model, blocks, "eager")
    return model, blocks, record(model, blocks, tokens(length=length, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", CONFIGS)
def test_every_gradient_of_every_block(family: str, device: str) -> None:
    model, blocks, seen = prepared(family, device)
    assert len(blocks) == LAYERS
    for block, (inputs, d_y) in zip(blocks, seen, strict=True):
        switch(model, blocks, "eager")
        want = results(block, inputs, d_y)
        switch(model, blocks, "moec")
        with CallCount() as count:
            got = results(block, inputs, d_y)
        assert count.calls == 1
        error, name = worst(got, want)
        assert error <= FP32, f"{name}: {error:.2e}"
        assert min(float(g.abs().max()) for g in want.values()) > 0
        # The comparison can fail: gate and up of one expert exchanged.
        experts = getattr(block, "experts", block)
        held = experts.gate_up_proj.data
        orders = {False: -2, True: -1}
        axis = orders[held.shape[-1] > held.shape[-2]]
        experts.gate_up_proj.data = held.clone()
        busy = int(inputs[1].flatten()[0]) if len(inputs) > 1 else slice(None)
        experts.gate_up_proj.data[busy] = held[busy].roll(held.shape[axis] // 2, axis)
        if family == "gpt_oss":  # interleaved
            experts.gate_up_proj.data[busy] = held[busy].flip(-1)
        assert worst(results(block, inputs, d_y), want)[0] > 1e-2
        experts.gate_up_proj.data = held


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", CONFIGS)
def test_calls_are_layers_times_forwards(family: str, device: str) -> None:
    by_name = build(family, "moec", device=device)
    if family == "llama4":  # the name alone runs eager there
        moec.transformers.enable(by_name)
    eager = build(family, device=device)
    with torch.no_grad(), CallCount() as count:
        for seed in range(3):
            got = by_name(tokens(seed=seed, device=device)).logits
            want = eager(tokens(seed=seed, device=device)).logits
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert count.calls == 3 * LAYERS


def low_precision(block: nn.Module, inputs: Any, d_y: torch.Tensor) -> dict[str, torch.Tensor]:
    """A bf16 block on bf16 x; routing weights stay in fp32."""
    low = [t.bfloat16() if i == 0 else t for i, t in enumerate(inputs)]
    block.bfloat16()
    found = results(block, low, d_y.bfloat16())
    block.float()
    assert found["y"].dtype == torch.bfloat16
    return found


def autocast(block: nn.Module, inputs: Any, d_y: torch.Tensor) -> dict[str, torch.Tensor]:
    """An fp32 block under autocast: fp32 in, fp32 out, fp32 gradients."""
    with torch.autocast(d_y.device.type, torch.bfloat16):
        found = results(block, inputs, d_y)
    assert all(t.dtype == torch.float32 for n, t in found.items() if n != "y")
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("run", [low_precision, autocast])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4"])
def test_bf16(family: str, run: Any, device: str) -> None:
    """No further from eager in fp32 than eager in bf16 is."""
    wide = {"sizes": WIDE, "length": 100} if device == "cuda" else {}
    model, blocks, seen = prepared(family, device, **wide)
    for block, (inputs, d_y) in zip(blocks, seen, strict=True):
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.copy_(parameter.bfloat16())
        inputs = (inputs[0].bfloat16().float(), *inputs[1:])
        d_y = d_y.bfloat16().float()
        exact = results(block, inputs, d_y)
        eager = run(block, inputs, d_y)
        switch(model, blocks, "moec")
        got = run(block, inputs, d_y)
        switch(model, blocks, "eager")
        for name, ref in exact.items():
            bound = 1.5 * worst({name: eager[name]}, {name: ref})[0] + BF16
            error = worst({name: got[name]}, {name: ref})[0]
            assert error <= bound, f"{name}: {error:.2e} and {bound:.2e}"


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = tokens(1, 12, seed=index)[0]
        return {"input_ids": ids, "labels": ids}


def test_trainer(tmp_path: Any) -> None:
    """The default optimiser, four steps: the same losses and weights as eager."""
    ends, losses = [], []
    for implementation in ("eager", "moec"):
        model = build("qwen3_moe", implementation).train()
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / implementation), max_steps=4, per_device_train_batch_size=4,
            learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
            seed=1, disable_tqdm=True,
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Samples())
        trainer.train()
        losses.append([e["loss"] for e in trainer.state.log_history if "loss" in e])
        ends.append({n: p.detach() for n, p in model.named_parameters()})
    assert len(losses[0]) == 4
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=0)
    for name, end in ends[0].items():
        torch.testing.assert_close(ends[1][name], end, rtol=0, atol=1e-3, msg=name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_generate(family: str, device: str) -> None:
    """Dynamic cache, static cache, and static cache compiled, give eager's tokens."""
    model = build(family, device=device)
    ids = tokens(2, 5, device=device)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options)
    chosen = moec.transformers.enable(model, frozen=True)
    assert len(chosen) == LAYERS
    with CallCount() as count:
        assert torch.equal(model.generate(ids, **options), expected)
    assert count.calls == 6 * LAYERS
    options["cache_implementation"] = "static"
    assert torch.equal(model.generate(ids, disable_compile=True, **options), expected)
    if family != "qwen3_moe":  # one compilation is enough, and slow
        return
    backend = "inductor" if device == "cuda" else "aot_eager"  # inductor: in CUDA graphs
    compiled = transformers.CompileConfig(backend=backend, fullgraph=True, dynamic=False)
    compiled._compile_all_devices = True
    counters.clear()
    assert torch.equal(model.generate(ids, compile_config=compiled, **options), expected)
    assert counters["stats"]["unique_graphs"] > 0


def test_compiled_from_the_first_call() -> None:
    """Nothing has run eagerly when the graph is traced."""
    model = build("qwen3_moe", "moec")
    expected = build("qwen3_moe")(tokens()).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens()).logits, expected, rtol=1e-4, atol=1e-4)


def test_frozen_until_refresh() -> None:
    model = build("mixtral")
    eager = copy.deepcopy(model)
    moec.transformers.enable(model, frozen=True)
    for changed in (model, eager):
        for name, parameter in changed.named_parameters():
            if name.endswith("down_proj"):
                parameter.data.mul_(1.5)
    moec.transformers.refresh(model)
    with torch.no_grad():
        got, want = model(tokens()).logits, eager(tokens()).logits
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_no_longer_frozen() -> None:
    """enable() without frozen: the weights are read by each call again."""
    model = build("mixtral")
    eager = copy.deepcopy(model)
    moec.transformers.enable(model, frozen=True)
    with torch.no_grad():
        model(tokens())
    chosen = moec.transformers.enable(model)
    assert all(not p.requires_grad for module in chosen for p in module.parameters())
    for changed in (model, eager):
        for name, parameter in changed.named_parameters():
            if name.endswith("down_proj"):
                parameter.data = 1.5 * parameter.data  # at another address, too
    with torch.no_grad():
        got, want = model(tokens()).logits, eager(tokens()).logits
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_strided_parameters_are_not_frozen() -> None:
    """On the refusal nothing has been changed."""
    model = build("qwen3_moe")
    down = moec.transformers.enable(model)[-1].down_proj
    switch(model, [], "eager")
    down.data = down.data.repeat_interleave(2, -1)[..., ::2]
    with pytest.raises(ValueError, match="down .* has the strides"):
        moec.transformers.enable(model, frozen=True)
    assert model.config._experts_implementation == "eager"
    assert all(p.requires_grad for p in model.parameters())


def test_meta_tensors() -> None:
    model = build("qwen3_moe", "moec").to("meta")
    logits = model(tokens().to("meta")).logits
    assert logits.is_meta and logits.shape[-1] == model.config.vocab_size


def test_what_is_not_known_is_named() -> None:
    model = build("qwen3_moe")
    experts = moec.transformers.enable(model)[0]
    own = type(experts)
    half = {"_apply_gate": lambda self, both: both.chunk(2, -1)[0]}
    renamed = type("StrangeExperts", (own,), half)
    experts.__class__ = renamed
    with pytest.raises(NotImplementedError, match="StrangeExperts"):
        moec.transformers.enable(model)
    wrong = {"_apply_gate": lambda self, both: own._apply_gate(self, both) * 1.01}
    wrong["_apply_gate"].__name__ = "_default_apply_gate"
    experts.__class__ = type("AlmostExperts", (own,), wrong)
    with pytest.raises(NotImplementedError, match="AlmostExperts"):
        moec.transformers.enable(model)
    experts.__class__ = own
    experts.act_fn = nn.Hardswish()
    with pytest.raises(NotImplementedError, match="Qwen3MoeExperts .*Hardswish"):
        moec.transformers.enable(model)
    experts.act_fn = nn.SiLU()
    experts.has_post_expert_norm = True
    with pytest.raises(NotImplementedError, match="Qwen3MoeExperts"):
        moec.transformers.enable(model)
    experts.has_post_expert_norm = False
    assert len(moec.transformers.enable(model)) == LAYERS


def test_what_changed_is_seen() -> None:
    """By enable() the activation, by each call the shapes of the weights."""
    model = build("qwen3_moe", "moec")
    experts = moec.transformers.enable(model)
    with torch.no_grad():
        for module in experts:
            module.gate_up_proj.mul_(8)  # gates differ far from 0
        before = model(tokens()).logits
        for module in experts:
            module.act_fn = nn.GELU()
        moec.transformers.enable(model)
        got = model(tokens()).logits
        assert not torch.allclose(got, before, rtol=1e-2, atol=1e-2)
        switch(model, [], "eager")
        torch.testing.assert_close(got, model(tokens()).logits, rtol=1e-3, atol=1e-3)
        for module in experts:  # narrower experts, by the name of the implementation
            halves = module.gate_up_proj.chunk(2, 1)
            module.gate_up_proj = nn.Parameter(torch.cat([h[:, :16] for h in halves], 1))
            module.down_proj = nn.Parameter(module.down_proj[..., :16].clone())
        expected = model(tokens()).logits
        model.config._experts_implementation_internal = "moec"
        torch.testing.assert_close(model(tokens()).logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["gpt_oss", "llama4"])
def test_classes_made_by_wrappers(family: str) -> None:
    """FSDP and parametrizations give a module a subclass of its class, under another name."""
    model = build(family)
    with torch.no_grad():
        expected = model(tokens()).logits
    for module in moec.transformers.enable(model):
        for wrapped in {module, block_of(module, model)}:
            wrapped.__dict__.pop("forward", None)
            own = type(wrapped)
            wrapped.__class__ = type(f"FSDP{own.__name__}", (own,), {})
    assert len(moec.transformers.enable(model)) == LAYERS
    with torch.no_grad(), CallCount() as count:
        torch.testing.assert_close(model(tokens()).logits, expected, rtol=1e-3, atol=1e-3)
    assert count.calls == LAYERS


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_defaults_of_type_and_device(family: str) -> None:
    """The table is checked in fp32 on the CPU whatever they are."""
    model = build(family).bfloat16()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert len(moec.transformers.enable(model)) == LAYERS
        with torch.device("meta"):
            assert len(moec.transformers.enable(model)) == LAYERS
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_copies_of_a_block(how: str, tmp_path: Path) -> None:
    """A copy of Llama-4 runs on moec, with weights of its own."""
    model = build("llama4")
    moec.transformers.enable(model)
    with torch.no_grad():
        expected = model(tokens()).logits
        if how == "save":
            torch.save(model, tmp_path / "model.pt")
            copied = torch.load(tmp_path / "model.pt", weights_only=False)
        else:
            copied = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.zero_()
        with CallCount() as count:
            assert torch.equal(copied(tokens()).logits, expected)
    assert count.calls == LAYERS


def test_a_block_left_out_is_an_error() -> None:
    model = build("qwen3_moe")
    left = nn.Module()
    left.experts = nn.ModuleList([nn.Linear(4, 4)])
    model.model.layers[1].mlp = left
    with pytest.raises(NotImplementedError, match="experts is a ModuleList"):
        moec.transformers.enable(model)
    assert model.config._experts_implementation == "eager"
    with pytest.raises(ValueError, match="no MoE block"):
        moec.transformers.enable(nn.Linear(4, 4))


def test_weights_in_other_types_are_refused() -> None:
    """Before anything has changed: scales of such weights would not be read."""
    model = build("qwen3_moe")
    before = model.config._experts_implementation
    modules = [m for m in model.modules() if type(m).__name__ == "Qwen3MoeExperts"]
    modules[-1].double()
    match = "Qwen3MoeExperts has weights in torch.float64"
    for frozen in (False, True):
        with pytest.raises(NotImplementedError, match=match):
            moec.transformers.enable(model, frozen=frozen)
    assert model.config._experts_implementation == before
    assert all(p.requires_grad for m in modules for p in m.parameters())
