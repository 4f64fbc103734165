# SPDX-License-Identifier: Apache-2.0
"""Which layer of a checkpoint is read: numbers, names, drafts, several models in one file."""

from __future__ import annotations

from pathlib import Path

import pytest

import moec
from conftest import tiny_shape
from moec import synth
from moec.checkpoint import Checkpoint, CheckpointError
from moec.model import read_layer

ALL = moec.Save.ALL


def layers_of(path: Path, *stems: str) -> dict[str, synth.MemoryCheckpoint]:
    """A folder with one layer of qwen3_moe under each stem, every one with its own values."""
    made = {}
    for seed, stem in enumerate(stems):
        layer = synth.make(tiny_shape("qwen3_moe"), dtype="f32", seed=seed)
        renamed = {stem + name.removeprefix("model.layers.0"): a for name, a in layer.items()}
        made[stem] = synth.MemoryCheckpoint(renamed, layer.config)
    tensors = {name: array for layer in made.values() for name, array in layer.items()}
    synth.write(synth.MemoryCheckpoint(tensors, made[stems[0]].config), path)
    return made


def chosen(path: Path, layer: int | str | None = None) -> str:
    spec = read_layer(Checkpoint(path), layer, save=ALL)
    assert all(name.startswith(f"{spec.name}.") for name in spec.names.values())
    return spec.name


def test_layer_numbers(tmp_path: Path) -> None:
    layers_of(tmp_path, "model.layers.3", "model.layers.5")
    assert chosen(tmp_path) == "model.layers.3"
    assert chosen(tmp_path, 5) == chosen(tmp_path, "5") == "model.layers.5"
    match = r"layer 4 has no MoE block; model.layers 3 to 5 \(2 of them\) have"
    with pytest.raises(CheckpointError, match=match):
        read_layer(Checkpoint(tmp_path), 4, save=ALL)


@pytest.mark.parametrize("wrapper", ["", "module."])
@pytest.mark.parametrize("draft", ["mtp.layers.0", "model.mtp.layers.0", "mtp.0",
                                   "model.mtp_layers.0"])
def test_drafts_are_chosen_by_name(tmp_path: Path, draft: str, wrapper: str) -> None:
    own, draft = f"{wrapper}model.layers.0", wrapper + draft
    layers_of(tmp_path, own, f"{wrapper}model.layers.1", draft)
    assert chosen(tmp_path) == chosen(tmp_path, 0) == chosen(tmp_path, own) == own
    assert chosen(tmp_path, 1) == f"{wrapper}model.layers.1"
    mtp = "mtp_layers.0" if "mtp_layers" in draft else "mtp.0"
    assert chosen(tmp_path, mtp) == chosen(tmp_path, draft) == draft
    stem = draft.removesuffix(".0")
    with pytest.raises(CheckpointError, match=f"layer 7 has no MoE block; .*{stem} 0 to 0"):
        read_layer(Checkpoint(tmp_path), 7, save=ALL)


def test_a_model_of_drafts_alone(tmp_path: Path) -> None:
    layers_of(tmp_path, "mtp.layers.0")
    with pytest.raises(CheckpointError, match="layer 0 has no MoE block; mtp.layers 0 to 0"):
        read_layer(Checkpoint(tmp_path), save=ALL)
    assert chosen(tmp_path, "mtp.0") == "mtp.layers.0"


@pytest.mark.parametrize("layer", [None, 0])
def test_two_models_are_refused(tmp_path: Path, layer: int | None) -> None:
    layers_of(tmp_path, "teacher.model.layers.0", "student.model.layers.0")
    with pytest.raises(CheckpointError) as caught:
        read_layer(Checkpoint(tmp_path), layer, save=ALL)
    assert "student.model.layers and teacher.model.layers" in str(caught.value)
    assert "student.0 or teacher.0" in str(caught.value)
    assert chosen(tmp_path, "teacher.0") == "teacher.model.layers.0"
    with pytest.raises(CheckpointError, match="layer model.0 fits student.* and teacher"):
        read_layer(Checkpoint(tmp_path), "model.0", save=ALL)


def test_a_model_beside_its_average(tmp_path: Path) -> None:
    """The table's prefix is the model's."""
    layers_of(tmp_path, "ema.model.layers.0", "model.layers.0")
    assert chosen(tmp_path) == "model.layers.0"
    assert chosen(tmp_path, "ema.0") == "ema.model.layers.0"
