# SPDX-License-Identifier: Apache-2.0
"""QLoRA: PEFT's adapters on experts in four bits, beside its own way on plain experts of the same
values."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models import DEVICES, tokens
from packed_models import SIZES, STACKS, WIDE, dense_twin, draw_mxfp4, experts, load, saved
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from peft.tuners.lora.layer import ParamWrapper
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Mxfp4Config

import moec.transformers
from moec.torch._packed import PackedTensor
from moec.transformers import _peft, _save

FAMILIES = ["qwen3_moe", "gpt_oss", "mixtral"]
BASES = [*((base, family) for base in ("full", "nf4") for family in FAMILIES),
         ("mxfp4", "gpt_oss")]
STEPS = 3


def adapted(model: Any, names: tuple[str, ...] = ("default",)) -> Any:
    """A model with adapters on attention and on experts, whose B are not 0."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"],
                        target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    made = get_peft_model(model, config)
    for name in names[1:]:
        made.add_adapter(name, config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            factor = 0.1 if "lora_B" in name else 1 / 8
            drawn = factor * torch.randn(parameter.shape, generator=generator)
            parameter.data = drawn.to(parameter.device)
    return made


def train(model: Any) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses and gradients of a few steps."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimiser = torch.optim.SGD(trained.values(), lr=0.05)
    losses, gradients = [], []
    ids = tokens(device=model.device.type)
    for _ in range(STEPS):
        optimiser.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append({n: p.grad.clone() for n, p in trained.items()})
        optimiser.step()
    return losses, gradients


def pair(
    base: str, family: str, place: Path, device: str, dtype: torch.dtype, sizes: dict[str, int],
) -> tuple[Any, Any]:
    """A model on moec, and transformers' own of the same values: experts in NF4, MXFP4, or plain
    in a model whose other layers are NF4."""
    place = saved(place, family, dtype, sizes)
    if base == "mxfp4":
        draw_mxfp4(place)
        options = {"dtype": dtype, "device_map": device}
        plain = Mxfp4Config(dequantize=True)
        twin = AutoModelForCausalLM.from_pretrained(
            place, quantization_config=plain, experts_implementation="eager", **options).to(dtype)
        return AutoModelForCausalLM.from_pretrained(place, **options), twin
    if base == "nf4":
        packed = load(place, dtype, device_map=device)
        return packed, dense_twin(packed, place, dtype, device_map=device)
    skip = {"llm_int8_skip_modules": ["experts", "lm_head"]}
    model, twin = (load(place, dtype, device, **skip) for _ in range(2))
    moec.transformers.enable(model)
    twin.config._experts_implementation_internal = "eager"
    return model, twin


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("base", "family"), BASES)
def test_three_steps(
    base: str, family: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, every gradient of the first step and its norm, beside PEFT's own way."""
    model, twin = pair(base, family, tmp_path, device, torch.float32, SIZES)
    want_losses, want = train(adapted(twin))
    if base == "nf4":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = adapted(model)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a packed stack was read as a dense one")

    monkeypatch.setattr(PackedTensor, "dequantise", refuse)
    losses, got = train(model)
    assert losses == pytest.approx(want_losses, rel=1e-5 if device == "cpu" else 1e-4)
    assert losses[0] > losses[-1]
    for ours, theirs in zip(got, want, strict=True):
        assert ours.keys() == theirs.keys()
        assert sum("experts" in name for name in ours) == 4 * len(experts(model))
        for name, value in theirs.items():
            error = (ours[name] - value).norm() / value.norm().clamp(min=1e-12)
            assert error < 2e-3, f"{name}: {error:.1e}"
    for name, value in want[0].items():
        norm = float(value.norm())
        assert float(got[0][name].norm()) == pytest.approx(norm, rel=1e-4, abs=1e-9), name


def assert_near(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Gradients of two models that round in 16 bits. A token near a tie may take another expert in
    each of the two, so that the bound is wide; an adapter left out is an error of 1."""
    ours, wanted = (torch.cat([value.flatten().float() for value in one.values()])
                    for one in (got, want))
    assert (ours - wanted).norm() < 0.25 * wanted.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("base", "family"), BASES)
def test_a_step_in_bf16(base: str, family: str, device: str, tmp_path: Path) -> None:
    """In sizes that tensor cores take."""
    model, twin = pair(base, family, tmp_path, device, torch.bfloat16, WIDE)
    (want_losses, want), (losses, got) = train(adapted(twin)), train(adapted(model))
    assert losses[0] == pytest.approx(want_losses[0], rel=1e-2)
    assert_near(got[0], want[0])


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointing_and_accumulation(is_reentrant: bool, tmp_path: Path) -> None:
    model = adapted(load(saved(tmp_path, "qwen3_moe", torch.float32), torch.float32))
    once = train(model)[1][0]
    model = adapted(load(tmp_path / "qwen3_moe", torch.float32))
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    model.enable_input_require_grads()
    model.train()
    for _ in range(2):
        (model(tokens(), labels=tokens()).loss / 2).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, once[name], rtol=1e-4, atol=1e-6)


def test_autocast(tmp_path: Path) -> None:
    """A model in fp32 under bf16 autocast is near the same in fp32."""
    model = adapted(load(saved(tmp_path, "qwen3_moe", torch.float32), torch.float32))
    want_losses, want = train(model)
    model = adapted(load(tmp_path / "qwen3_moe", torch.float32))
    with torch.autocast(model.device.type, torch.bfloat16):
        losses, got = train(model)
    assert losses == pytest.approx(want_losses, rel=1e-2) and losses != want_losses
    assert all(value.dtype == torch.float32 for value in got[0].values())
    assert_near(got[0], want[0])


@pytest.mark.parametrize("is_packed", [True, False])
def test_compiled(is_packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every break of a graph is the call of an experts module, once a layer and forward; after
    the second step nothing is compiled again."""
    place = saved(tmp_path, "qwen3_moe", torch.float32)
    skip = {} if is_packed else {"llm_int8_skip_modules": ["experts", "lm_head"]}
    base = load(place, torch.float32, **skip)
    moec.transformers.enable(base)
    model = adapted(base)
    counters.clear()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    optimiser = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.05)
    frames, served = [], list[Any]()
    orientation = _peft.is_in_out

    def record(module: Any) -> bool:
        served.append(module)
        return orientation(module)

    monkeypatch.setattr(_peft, "is_in_out", record)
    for step in range(4):
        ids = tokens(seed=step)
        optimiser.zero_grad()
        served.clear()
        loss = compiled(ids, labels=ids).loss
        loss.backward()
        assert served == experts(model)
        assert loss.item() == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-4)
        optimiser.step()
        frames.append(counter.frame_count)
    assert frames[1] == frames[3]
    reasons = counters["graph_break"]
    assert reasons and all("<function _call" in reason for reason in reasons)


def test_compiled_without_adapters(tmp_path: Path) -> None:
    """One graph of a model with packed experts; of other codes, none."""
    model = load(saved(tmp_path, "gpt_oss", torch.float32), torch.float32)
    compiled = torch.compile(experts_only := experts(model)[0], fullgraph=True,
                             backend="aot_eager")
    torch.manual_seed(5)
    weights, ids = torch.randn(7, 8).softmax(-1).topk(3)
    given = [torch.randn(7, 64, requires_grad=True), ids, weights.requires_grad_()]
    leaves = [given[0], given[2], experts_only.down_proj_bias]
    for _ in range(2):
        y, want_y = compiled(*given), experts_only(*given)
        got, want = (torch.autograd.grad(one.square().sum(), leaves) for one in (y, want_y))
        assert all(map(torch.equal, (y, *got), (want_y, *want)))
    with torch.no_grad():
        compiled(*given)
        experts_only.down_proj.parts[".absmax"].add_(1)
        with pytest.raises(RuntimeError, match="compile again"):
            compiled(*given)


def drawn_by_name(model: Any) -> Any:
    """Factors that depend on the parameter alone, not on the nesting of its wrapper."""
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            for seed, held in enumerate((module.lora_A, module.lora_B)):
                generator = torch.Generator().manual_seed(2 * len(module.parameter_name) + seed)
                weight = held["default"].weight
                drawn = 0.1 * torch.randn(weight.shape, generator=generator)
                weight.data = drawn.to(weight.device)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_parametrised_experts(family: str, tmp_path: Path) -> None:
    """What bitsandbytes' replace_parameter_4bit makes, around which PEFT nests its wrappers the
    other way round, trains as experts that are packed on load."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    place = saved(tmp_path, family, torch.float32)
    packed = load(place, torch.float32)
    other = load(place, torch.float32, llm_int8_skip_modules=["experts", "lm_head"])
    names = [f"{path}.{name}" for path, module in packed.named_modules()
             if hasattr(module, "_apply_gate") for name in STACKS]
    for module in experts(other):
        for name in STACKS:
            replace_parameter_4bit(module, name, compress_statistics=True, quant_type="nf4")
    moec.transformers.enable(other)
    found, nestings = [], []
    for model in (packed, other):
        made = drawn_by_name(get_peft_model(model, LoraConfig(
            r=4, lora_alpha=8, target_modules=[], target_parameters=names)))
        nestings.append([module.parameter_name for module in made.modules()
                         if isinstance(module, ParamWrapper)])
        found.append(train(made)[0])
    assert found[1] == pytest.approx(found[0], rel=1e-6) and found[0][0] > found[0][2]
    assert nestings[0] == nestings[1][::-1]  # so that there is something to get wrong


def test_adapters_are_chosen(tmp_path: Path) -> None:
    """set_adapter, and disable_adapter, as DPO uses them."""
    model = adapted(load(saved(tmp_path, "qwen3_moe", torch.float32), torch.float32),
                    ("default", "ref"))
    with torch.no_grad():
        default = model(tokens()).logits
        model.set_adapter("ref")
        other = model(tokens()).logits
        with model.disable_adapter():
            base = model(tokens()).logits
        model.set_adapter("default")
        assert torch.equal(model(tokens()).logits, default)
    assert not torch.allclose(default, other) and not torch.allclose(default, base)


@pytest.mark.parametrize("way", ["merge_and_unload", "merge_adapter"])
def test_merging_raises(way: str, tmp_path: Path) -> None:
    """And merges nothing: neither the codes nor what PEFT says of the adapters changes."""
    model = adapted(load(saved(tmp_path, "qwen3_moe")))
    held = [copy.deepcopy(module.down_proj.parts) for module in experts(model)]
    with pytest.raises(RuntimeError, match="packed experts.*save_merged"):
        getattr(model, way)()
    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    assert len(wrappers) == 2 * len(held) and not any(wrapper.merged for wrapper in wrappers)
    for parts, module in zip(held, experts(model), strict=True):
        assert all(torch.equal(parts[n], part) for n, part in module.down_proj.parts.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_merged_checkpoint(family: str, tmp_path: Path) -> None:
    model = adapted(load(saved(tmp_path, family, torch.float32), torch.float32))
    with torch.no_grad():
        want = model(tokens()).logits
        moec.transformers.save_merged(model, tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        torch.testing.assert_close(merged(tokens()).logits, want, rtol=2e-2, atol=2e-2)
        base = adapted(load(tmp_path / family, torch.float32))
        with base.disable_adapter():
            assert not torch.allclose(base(tokens()).logits, want, rtol=2e-2, atol=2e-2)


def test_a_merged_checkpoint_is_made_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is plain before it is handed on for writing is of one layer, or one tensor."""
    made, groups = list[str](), list[list[str]]()
    make, add = _save._Values.make, _save._Shards.add

    def recorded(self: Any, name: str) -> Any:
        made.append(name)
        return make(self, name)

    def written(self: Any, tensors: Any) -> None:
        groups.append(made.copy())
        made.clear()
        add(self, tensors)

    monkeypatch.setattr(_save._Values, "make", recorded)
    monkeypatch.setattr(_save._Shards, "add", written)
    model = adapted(load(saved(tmp_path, "qwen3_moe")))
    moec.transformers.save_merged(model, tmp_path / "merged")
    assert not made and len(groups) > len(experts(model))
    for names in groups:
        layers = {match[0] for name in names if (match := re.search(r"layers\.\d+", name))}
        assert len(layers) == 1 if len(names) > 1 else names
    assert sum(any("experts.down_proj" in n for n in names) for names in groups) == 2
