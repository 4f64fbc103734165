# SPDX-License-Identifier: Apache-2.0
"""gpt-oss in MXFP4: packed on load, trained, saved with the file's bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import DEVICES, tokens
from packed_models import STACKS, draw_mxfp4, experts, saved, train
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config, integrations
from transformers.quantizers import quantizer_mxfp4

import moec.transformers
from moec.torch._packed import PackedTensor

_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkpoint whose experts' codes and scales are drawn."""
    return draw_mxfp4(saved(tmp_path, "gpt_oss"))


def load(place: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_packed_and_trained(place: Path, device: str) -> None:
    model, ids = load(place, device_map=device), tokens(device=device)
    assert model.hf_quantizer.is_trainable
    assert {row.kind for row in moec.transformers.report(model)} == {"mxfp4"}
    plain = load(place, quantization_config=Mxfp4Config(dequantize=True), device_map=device,
                 experts_implementation="eager").float()  # transformers 5.17 makes bf16 of them
    assert not any(isinstance(p, PackedTensor) for p in plain.parameters())
    for mine, theirs in zip(experts(model), experts(plain), strict=True):
        for name in STACKS:
            held = getattr(mine, name)
            assert torch.equal(held.dequantise(), getattr(theirs, name))
            # By hand: the low half of a byte is the first of two values.
            byte, scale = held.parts["_blocks"][1, 2, 0, 3], held.parts["_scales"][1, 2, 0]
            code = int(byte) & 15
            value = _VALUES[code & 7] * (-1) ** (code >> 3) * 2.0 ** (int(scale) - 127)
            assert held[1][6, 2] == value
    for one in (model, plain):
        one.zero_grad()
        one(ids, labels=ids).loss.backward()
    wanted = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, PackedTensor):
            torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-3, atol=1e-5)
    losses = train(model, rate=0.05)
    assert losses[0] > losses[1] > losses[2]


def test_kernels_that_do_not_train_are_not_taken(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine with Triton and its kernels, for which transformers replaces the experts."""
    def replace(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("experts of transformers' kernels")

    for name in ("is_triton_available", "is_kernels_available"):
        monkeypatch.setattr(quantizer_mxfp4, name, lambda *_: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(quantizer_mxfp4.Mxfp4HfQuantizer, "_lazy_import_kernels", replace,
                        raising=False)  # transformers 5.17 asks for them before
    monkeypatch.setattr(integrations, "replace_with_mxfp4_linear", replace)
    with pytest.raises(NotImplementedError):  # the stand-in is believed: to quantise is theirs
        load(saved(tmp_path / "plain", "gpt_oss"), quantization_config=Mxfp4Config())
    model = load(place)
    assert model.hf_quantizer.is_trainable
    assert {row.kind for row in moec.transformers.report(model)} == {"mxfp4"}
    losses = train(model, rate=0.05)
    assert losses[0] > losses[1] > losses[2]


def test_saved_bytes_are_the_file_s(place: Path, tmp_path: Path) -> None:
    model = load(place)
    want = model(tokens()).logits
    model.save_pretrained(tmp_path / "saved")
    old, new = (load_file(at / "model.safetensors") for at in (place, tmp_path / "saved"))
    assert old.keys() == new.keys()
    assert all(torch.equal(new[n], t) for n, t in old.items() if n.endswith(("_blocks", "_scales")))
    assert torch.equal(load(tmp_path / "saved")(tokens()).logits, want)
    moec.transformers.save_merged(model, tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(load(tmp_path / "merged")(tokens()).logits, want,
                               rtol=1e-4, atol=1e-5)


def test_a_missing_scale_is_an_error(place: Path) -> None:
    file = place / "model.safetensors"
    held = load_file(file)
    del held["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(held, file, {"format": "pt"})
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        load(place)
