# SPDX-License-Identifier: Apache-2.0
"""Adapters in PEFT's files without PEFT: read by it, and read from it, whatever the nesting and
whatever release wrote them. Shown once to fail: ranks and experts of lora_B exchanged."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, tokens
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

import moec
import moec.torch
import moec.transformers

FAMILIES = ["qwen3_moe", "gpt_oss"]


class Twin(nn.Module):
    """moec.torch's modules over the matrices of a model, under its paths."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.model.layers = nn.Module(), nn.ModuleList()
        for layer in model.model.layers:
            block = nn.Module()
            block.mlp = nn.Module()
            block.mlp.experts = of_experts(layer.mlp.experts)
            self.model.layers.append(block)

    def experts(self) -> list[moec.torch.Experts]:
        return [layer.mlp.experts for layer in self.model.layers]


def of_experts(held: Any) -> moec.torch.Experts:
    """By what moec.transformers reads off the class; gpt-oss has biases."""
    from moec.transformers._experts import spec_of, tensors_of

    spec, tensors = spec_of(held, 3), tensors_of(held)
    made = moec.torch.Experts(
        spec.experts, gate_layout=spec.gate_layout, gate_up_orientation=spec.gate_up_orientation,
        down_orientation=spec.down_orientation, bias="down_bias" in tensors)
    made.load_state_dict({n: t.detach() for n, t in tensors.items()})
    return made


def adapted(family: str, sizes: Any = None, **more: Any) -> Any:
    options = {"r": 4, "lora_alpha": 8, "target_modules": [],
               "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    made = get_peft_model(build(family, sizes=sizes), LoraConfig(**options | more))
    torch.manual_seed(5)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.2)
    return made


def given(experts: Any) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(8)
    weights, ids = torch.randn(11, experts.desc.num_experts).softmax(-1).topk(3)
    return torch.randn(11, experts.desc.hidden), ids, weights


def outputs(twin: Twin) -> list[torch.Tensor]:
    return [one(*given(one)).detach() for one in twin.experts()]


def of_peft(model: Any, twin: Twin) -> list[torch.Tensor]:
    layers = model.base_model.model.model.layers
    with torch.no_grad():
        return [layer.mlp.experts(*given(one)) for layer, one in
                zip(layers, twin.experts(), strict=True)]


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(got, want, strict=True))


def change(folder: Path, make: Any, **config: Any) -> None:
    """Another file of the same adapter."""
    file = folder / "adapter_model.safetensors"
    save_file({n: t.contiguous() for n, t in make(load_file(file)).items()}, file)
    text = folder / "adapter_config.json"
    text.write_text(json.dumps(json.loads(text.read_text()) | config))


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_both_ways(family: str, rslora: bool, tmp_path: Path) -> None:
    model = adapted(family, use_rslora=rslora)
    twin = Twin(build(family))
    without = outputs(twin)
    want = of_peft(model, twin)
    model.save_pretrained(tmp_path / "peft")
    assert moec.torch.load_adapter(twin, tmp_path / "peft", "one") == []
    assert same(outputs(twin), want) and not same(without, want)
    moec.torch.save_adapter(twin, tmp_path / "ours", "one")
    again = PeftModel.from_pretrained(build(family), tmp_path / "ours")
    assert same(of_peft(again, twin), want)
    other = Twin(build(family))
    moec.torch.load_adapter(other, tmp_path / "ours")
    assert all(torch.equal(a, b) for a, b in zip(outputs(other), outputs(twin), strict=True))


def turned(tensors: dict[str, Any]) -> dict[str, Any]:
    """As PEFT 0.18 wrote factors of stacks [E,out,in]: A [E r,out], B [in,r E]."""
    made = dict(tensors)
    for key, a in tensors.items():
        if "experts" in key and "lora_A" in key:
            b = tensors[key.replace("lora_A", "lora_B")]
            halves = a.view(8, -1, a.shape[1]), b.view(b.shape[0], -1, 8).permute(2, 0, 1)
            made[key] = halves[1].transpose(1, 2).reshape(-1, b.shape[0])
            made[key.replace("lora_A", "lora_B")] = (
                halves[0].transpose(1, 2).permute(1, 2, 0).reshape(a.shape[1], -1))
    return made


def exchanged(tensors: dict[str, Any]) -> dict[str, Any]:
    """The wrapper of down_proj inside."""
    return {key.replace(".base_layer.", ".") if ".base_layer." in key
            else key.replace(".lora_", ".base_layer.lora_"): t for key, t in tensors.items()}


@pytest.mark.parametrize("make", [turned, exchanged, lambda t: turned(exchanged(t))])
def test_other_files_of_the_same_adapter(make: Any, tmp_path: Path) -> None:
    model, twin = adapted("qwen3_moe"), Twin(build("qwen3_moe"))
    want = of_peft(model, twin)
    model.save_pretrained(tmp_path)
    change(tmp_path, make)
    moec.torch.load_adapter(twin, tmp_path)
    assert same(outputs(twin), want)


@pytest.mark.parametrize("inter", [24, 32])
@pytest.mark.parametrize(("family", "version"), [
    ("qwen3_moe", "0.18.1"), ("llama4", "0.18.1"), ("qwen3_moe", "0.19.0"), ("gpt_oss", "0.19.0"),
])
def test_converted_for_peft(family: str, version: str, inter: int, tmp_path: Path) -> None:
    """A file of PEFT 0.18 is one that PEFT loads, with the tensors that PEFT 0.21 writes; of PEFT
    0.19.0 those of stacks [E,in,out], too. With 32 the stack of down is square: PEFT takes its
    factors as they are, for others."""
    sizes = {"moe_intermediate_size": inter, "intermediate_size": inter, "hidden_size": 32}
    model = adapted(family, sizes, target_modules=["q_proj"])
    want = model(tokens()).logits
    model.save_pretrained(tmp_path / "new")
    model.save_pretrained(tmp_path / "old")
    change(tmp_path / "old", turned, peft_version=version)
    base = build(family, sizes=sizes)
    moec.transformers.convert_adapter(base, tmp_path / "old", tmp_path / "again")
    new, again = (load_file(tmp_path / at / "adapter_model.safetensors") for at in ("new", "again"))
    assert new.keys() == again.keys() and all(torch.equal(again[n], t) for n, t in new.items())
    moec.transformers.enable(base)
    loaded = PeftModel.from_pretrained(base, tmp_path / "again")
    torch.testing.assert_close(loaded(tokens()).logits, want, rtol=1e-3, atol=1e-4)


def test_what_is_not_converted(tmp_path: Path) -> None:
    adapted("gpt_oss").save_pretrained(tmp_path)
    convert, gpt_oss = moec.transformers.convert_adapter, build("gpt_oss")
    with pytest.raises(ValueError, match="which wrote it as it is read"):
        convert(gpt_oss, tmp_path, tmp_path / "no")
    change(tmp_path, lambda t: t, peft_version="0.18.1")
    with pytest.raises(ValueError, match=r"no factors .*model\.layers\.0\.mlp\.experts"):
        convert(gpt_oss, tmp_path, tmp_path / "no")  # [E,in,out] was as it is
    adapted("qwen3_moe").save_pretrained(tmp_path)
    change(tmp_path, lambda t: t, peft_version="0.18.1")
    with pytest.raises(ValueError, match=r"lora_A.weight is \[32, 32\] beside \[48, 32\]; "):
        convert(build("qwen3_moe"), tmp_path, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_single_experts(tmp_path: Path) -> None:
    """As of transformers 4: a pair for each expert's linear layer."""
    desc = moec.ExpertsDesc(hidden=32, inter=24, num_experts=4, top_k=2)
    torch.manual_seed(3)
    extents = {"gate_proj": (32, 24), "up_proj": (32, 24), "down_proj": (24, 32)}
    tensors, stacks = {}, {}
    for leaf, (inner, outer) in extents.items():
        a, b = torch.randn(4, 3, inner) / 4, torch.randn(4, outer, 3) / 4
        stacks[leaf] = 6 / 3**0.5 * b @ a
        for e in range(4):
            key = f"base_model.model.mlp.experts.{e}.{leaf}"
            tensors |= {f"{key}.lora_A.weight": a[e].clone(), f"{key}.lora_B.weight": b[e].clone()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "use_rslora": True}))
    for layout in (moec.GateLayout.GATE_THEN_UP, moec.GateLayout.INTERLEAVED,
                   moec.GateLayout.SPLIT):
        model = nn.Module()
        model.mlp = nn.Module()
        experts = model.mlp.experts = moec.torch.Experts(desc, gate_layout=layout)
        moec.torch.load_adapter(model, tmp_path)
        got = experts(*(t[:, :2] if t.shape[1] == 3 else t for t in given(experts)))
        experts.set_adapters()
        with torch.no_grad():
            experts.down += stacks["down_proj"]
            if layout == moec.GateLayout.SPLIT:
                experts.gate += stacks["gate_proj"]
                experts.up += stacks["up_proj"]
            elif layout == moec.GateLayout.GATE_THEN_UP:
                experts.gate_up += torch.cat([stacks["gate_proj"], stacks["up_proj"]], 1)
            else:
                experts.gate_up[:, ::2] += stacks["gate_proj"]
                experts.gate_up[:, 1::2] += stacks["up_proj"]
        want = experts(*(t[:, :2] if t.shape[1] == 3 else t for t in given(experts)))
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_a_square_matrix_needs_the_version(tmp_path: Path) -> None:
    """Nothing but the version says which way its factors lie."""
    desc = moec.ExpertsDesc(hidden=32, inter=32, num_experts=4, top_k=2)
    model = nn.Module()
    model.experts = moec.torch.Experts(desc).add_adapter("default", 2, matrices=["down"])
    factor = model.experts.adapters["default"]["down"]
    with torch.no_grad():
        factor.b.normal_()
    moec.torch.save_adapter(model, tmp_path)
    for version, is_turned in (("0.18.1", True), ("0.19.0", True), ("0.19.1", False)):
        change(tmp_path, lambda t: t, peft_version=version)
        moec.torch.load_adapter(model, tmp_path, version.replace(".", "_"))
        got = model.experts.adapters[version.replace(".", "_")]["down"]
        want = (factor.b.mT, factor.a.mT) if is_turned else (factor.a, factor.b)
        assert torch.equal(got.a, want[0]) and torch.equal(got.b, want[1])
    change(tmp_path, lambda t: t, peft_version=None)
    with pytest.raises(ValueError, match="square matrix"):
        moec.torch.load_adapter(model, tmp_path, "three")


def test_a_converted_rslora_adapter_warns(tmp_path: Path) -> None:
    twin = Twin(build("qwen3_moe"))
    for one in twin.experts():
        one.add_adapter("default", 4, alpha=8, rslora=True)
    moec.torch.save_adapter(twin, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moec.torch.load_adapter(twin, tmp_path, "plain")
    for one in twin.experts():
        half = one.adapters["default"]["gate_up"]
        half.a = nn.Parameter(half.a.repeat(1, 2, 1))
        half.b, half.alpha = nn.Parameter(half.b.repeat(1, 1, 2)), 16
    moec.torch.save_adapter(twin, tmp_path)
    with pytest.warns(UserWarning, match="sqrt\\(2\\) times the trained 4.0000"):
        moec.torch.load_adapter(twin, tmp_path, "doubled")


def test_what_is_refused(tmp_path: Path) -> None:
    adapted("qwen3_moe", target_modules=["q_proj"]).save_pretrained(tmp_path)
    plain = build("qwen3_moe")
    with pytest.raises(ValueError, match="no Experts or MoELayer of moec.torch; a transformers"):
        moec.torch.load_adapter(plain, tmp_path)
    twin = Twin(plain)
    with pytest.raises(ValueError, match="q_proj.* are of no module of experts"):
        moec.torch.load_adapter(twin, tmp_path)
    assert len(moec.torch.load_adapter(twin, tmp_path, strict=False)) == 4
    change(tmp_path, lambda t: {n: v for n, v in t.items() if "q_proj" not in n})
    with pytest.raises(ValueError, match="there is an adapter 'default'"):
        moec.torch.load_adapter(twin, tmp_path)
    with pytest.raises(ValueError, match="no module of the model has an adapter 'two'"):
        moec.torch.save_adapter(twin, tmp_path / "no", "two")
    change(tmp_path, lambda t: {n: v[:, :-1] for n, v in t.items()})
    with pytest.raises(ValueError, match=r"is \[32, 31\] beside .* are needed"):
        moec.torch.load_adapter(twin, tmp_path, "two")
    change(tmp_path, lambda t: {n: v for n, v in t.items() if "lora_A" in n})
    with pytest.raises(ValueError, match="is alone"):
        moec.torch.load_adapter(twin, tmp_path, "two")
    change(tmp_path, lambda t: t, use_dora=True)
    with pytest.raises(NotImplementedError, match="LORA with use_dora"):
        moec.torch.load_adapter(twin, tmp_path, "two")
    with pytest.raises(ValueError, match="the module of experts itself"):
        moec.torch.save_adapter(twin.experts()[0], tmp_path)
