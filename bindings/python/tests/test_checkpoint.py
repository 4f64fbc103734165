# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: every row of the families table, sharded folders, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import moec
from conftest import assert_close, tiny_shape
from moec import naive, synth
from moec.checkpoint import Checkpoint, CheckpointError, SafetensorsFile, write
from moec.families import BY_MODEL_TYPE, FAMILIES
from moec.model import MoeLayer, read_layer

ALL = moec.Save.ALL


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("model_type", [family.model_types[0] for family in FAMILIES])
def test_published_names(
    context: moec.Context, tmp_path: Path, rng: np.random.Generator, model_type: str, dtype: str
) -> None:
    """A layer under published names, written, read back and run, equals the NumPy loop."""
    zeros = 4 if model_type == "longcat_flash" else 0
    top_k = 1 if model_type == "llama4" else 2
    made = synth.make(tiny_shape(model_type, zero_experts=zeros, top_k=top_k), dtype=dtype, layer=1)
    synth.write(made, tmp_path, shards=2)
    checkpoint = Checkpoint(tmp_path)
    spec = read_layer(checkpoint, save=ALL)
    assert spec.number == 1 and spec.experts.num_zero_experts == zeros
    layer = MoeLayer(context, spec, frozen=False)
    x = rng.standard_normal((13, 32), np.float32).astype(moec.numpy_dtype(dtype))
    result = layer.forward(x, want=["expert_ids"])
    grads = layer.backward(result, x)
    assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in grads.values())
    ids, _ = naive.route(x.astype(np.float32), spec)
    same = (np.sort(ids, 1) == np.sort(result.expert_ids, 1)).all(1)
    assert same.mean() > 0.7 if dtype == "bf16" else same.all()
    expected = naive.forward(x.astype(np.float32), spec)
    assert_close(np.asarray(result.y, np.float32)[same], expected[same],
                 3e-2 if dtype == "bf16" else 2e-5)
    parameters = set(made) - {spec.names.get("select_bias")}
    assert set(grads) == {"x"} | parameters


@pytest.mark.parametrize("inter", [24, 16, 32])
def test_orientation_is_read_from_the_shapes(
    context: moec.Context, tmp_path: Path, rng: np.random.Generator, inter: int
) -> None:
    """Qwen3-VL-MoE is published [E,H,2I] and saved by transformers 5 [E,2I,H], under one name; one
    matrix is square when H is 2 I or I."""
    made = synth.make(tiny_shape("qwen3_vl_moe", inter=inter), dtype="f32")
    turned = {name: np.ascontiguousarray(a.swapaxes(1, 2)) if a.ndim == 3 else a
              for name, a in made.items()}
    x = rng.standard_normal((5, 32), np.float32)
    y = []
    for tensors in (made, turned):
        synth.write(synth.MemoryCheckpoint(tensors, made.config), tmp_path)
        spec = read_layer(Checkpoint(tmp_path), save=ALL)
        y.append(MoeLayer(context, spec, frozen=False).forward(x).y)
    assert spec.matrices.layout.down_orientation == moec.Orientation.OUT_IN
    assert_close(y[1], y[0], 1e-6)


def test_rows_of_identity_experts(tmp_path: Path) -> None:
    """LongCat-Flash as transformers 5 saves it has gate and up of experts without any."""
    made = folder(tmp_path, "longcat_flash", zero_experts=2)
    extra = {name.replace(".3.", f".{e}."): array for name, array in made.items()
             for e in (8, 9) if ".experts.3." in name and "down" not in name}
    assert len(extra) == 4
    rewrite(tmp_path, made | extra)
    spec = read_layer(Checkpoint(tmp_path), save=ALL)
    assert spec.experts.num_zero_experts == 2 and len(spec.matrices.names["up"]) == 8
    more = {name.replace(".8.", ".10."): array for name, array in extra.items()}
    rewrite(tmp_path, made | extra | more)
    with pytest.raises(CheckpointError, match=r"has no place for .*experts\.10\."):
        read_layer(Checkpoint(tmp_path), save=ALL)


def test_golden_names_are_a_family_each() -> None:
    assert len(BY_MODEL_TYPE) == sum(len(family.model_types) for family in FAMILIES)


def folder(path: Path, model_type: str = "qwen3_moe", **shape: object) -> synth.MemoryCheckpoint:
    made = synth.make(tiny_shape(model_type, **shape), dtype="f32")
    synth.write(made, path)
    return made


def rewrite(path: Path, made: dict[str, np.ndarray]) -> None:
    write(path / "model.safetensors", made, {})


def edit_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"


def without_tensor(path: Path) -> None:
    made = folder(path)
    del made[EXPERT]
    rewrite(path, made)


def with_quantised(path: Path) -> None:
    made = folder(path)
    made[EXPERT] = made[EXPERT].astype(np.int8)
    made[f"{EXPERT}_scale_inv"] = np.ones((1, 1), np.float32)
    rewrite(path, made)


def with_mxfp4(path: Path) -> None:
    made = folder(path, "gpt_oss")
    base = "model.layers.0.mlp.experts.gate_up_proj"
    del made[base]
    made[f"{base}_blocks"] = np.zeros((8, 48, 1, 16), np.uint8)
    rewrite(path, made)


def with_latent(path: Path) -> None:
    made = folder(path)
    made["model.layers.0.mlp.fc1_latent_proj.weight"] = np.ones((4, 4), np.float32)
    rewrite(path, made)


def with_missing_shard(path: Path) -> None:
    synth.write(synth.make(tiny_shape("qwen3_moe"), dtype="f32"), path, shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()


def with_damaged_header(path: Path) -> None:
    folder(path)
    file = path / "model.safetensors"
    file.write_bytes((1 << 40).to_bytes(8, "little") + file.read_bytes()[8:])


def with_header(**entries: object) -> Callable[[Path], None]:
    """A file of 16 bytes whose header has these entries."""
    def make(path: Path) -> None:
        header = json.dumps(entries).encode()
        length = len(header).to_bytes(8, "little")
        (path / "model.safetensors").write_bytes(length + header + bytes(16))
    return make


def entry(shape: object, *offsets: object, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def with_deep_header(path: Path) -> None:
    header = b'{"a":' + b"[" * 100_000
    length = len(header).to_bytes(8, "little")
    (path / "model.safetensors").write_bytes(length + header)


def with_cut_file(path: Path) -> None:
    folder(path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def with_config(**changes: object) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        folder(path)
        edit_config(path, **changes)
    return make


REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tensor is missing": (without_tensor, EXPERT),
    "quantised": (with_quantised, "int8"),
    "MXFP4": (with_mxfp4, "gate_up_proj_blocks"),
    "another score": (with_config(model_type="deepseek_v2", n_shared_experts=None,
                                  scoring_func="tanh"), "'tanh'"),
    "latent projection": (with_latent, "no place for model.layers.0.mlp.fc1_latent_proj.weight"),
    "a shard is missing": (with_missing_shard, "model-00002-of-00003.safetensors"),
    "header past the end": (with_damaged_header, "not a safetensors file"),
    "cut file": (with_cut_file, "damaged header"),
    "deep header": (with_deep_header, "damaged header"),
    "negative sizes": (with_header(a=entry([-2, -2], 0, 16)), "a has the shape [-2, -2]"),
    "a size that is no integer": (with_header(a=entry([4.0], 0, 16)), "damaged header"),
    "a place that is no integer": (with_header(a=entry([4], 0.0, 16.0)), "damaged header"),
    "metadata that is no object": (with_header(__metadata__=5), "damaged header"),
    "a config that is no JSON": (with_header(__metadata__={"config": "{"}), "config is not JSON"),
    "a config that is no text": (with_header(__metadata__={"config": []}), "config is not JSON"),
    "a config that is no object": (with_header(__metadata__={"config": "[]"}), "holds list"),
    "unknown model type": (with_config(model_type="qwen3_mo"), "did you mean qwen3_moe"),
    "no model type": (with_config(model_type=None), "is not in the families table"),
    "another count": (with_config(num_experts=9), "has 8 rows; the config says 9"),
    "no top_k": (with_config(num_experts_per_tok=None), "num_experts_per_tok"),
    "an object for a number": (with_config(num_experts_per_tok={"a": 1}), "not 'dict'"),
    "an infinite number": (with_config(num_experts_per_tok=float("inf")), "infinity"),
    "unknown activation": (with_config(hidden_act="mish"), "'mish'; 'silu'"),
    "a dense model": (with_config(model_type="dbrx"), "no MoE layer of dbrx"),
    "no weights": (lambda path: (path / "a.gguf").touch(), "found .gguf"),
    "no config": (lambda path: rewrite(path, {"a": np.ones(1, np.float32)}), "config.json"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(tmp_path: Path, name: str) -> None:
    make, text = REFUSALS[name]
    make(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        read_layer(Checkpoint(tmp_path), save=ALL)
    assert text in str(caught.value)


def test_shapes_that_numpy_does_not_have(tmp_path: Path) -> None:
    with_header(a=entry([0, 1 << 70], 0, 0), b=entry([1] * 65, 0, 4))(tmp_path)
    file = SafetensorsFile(tmp_path / "model.safetensors")
    for name in file:
        with pytest.raises(CheckpointError, match=f"{name} has the shape"):
            file[name]


def test_tensors_at_odd_places(tmp_path: Path) -> None:
    """Of writers that do not sort by size; this one does."""
    wanted = {"a": np.arange(3, dtype=np.uint8), "b": np.arange(4, dtype=np.float32)}
    with_header(a={"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
                b={"dtype": "F32", "shape": [3], "data_offsets": [3, 15]})(tmp_path)
    odd = SafetensorsFile(tmp_path / "model.safetensors")["b"]
    assert odd.flags.aligned and odd.tolist() == [0, 0, 0]
    write(tmp_path / "model.safetensors", wanted, {})
    file = SafetensorsFile(tmp_path / "model.safetensors")
    assert list(file) == ["b", "a"]
    for name, value in wanted.items():
        np.testing.assert_array_equal(file[name], value)


def test_nested_config(tmp_path: Path) -> None:
    made = folder(tmp_path, "llama4", top_k=1)
    text = dict(made.config) | {"model_type": "llama4_text"}
    nested = {"model_type": "llama4", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert read_layer(Checkpoint(tmp_path), save=ALL).family.model_types[0] == "llama4"


def test_group_and_scale_come_from_the_config(tmp_path: Path) -> None:
    folder(tmp_path, "deepseek_v3")
    edit_config(tmp_path, n_group=4, topk_group=2, routed_scaling_factor=2.5)
    router = read_layer(Checkpoint(tmp_path), save=ALL).router
    assert (router.selection, router.num_groups, router.top_groups) == (
        moec.Select.GROUP_TOPK, 4, 2)
    assert router.scale == 2.5 and router.norm_eps == 1e-20


def test_the_index_says_where_a_tensor_is(tmp_path: Path) -> None:
    made = synth.make(tiny_shape("qwen3_moe"), dtype="f32")
    synth.write(made, tmp_path, shards=2)
    old = {name: np.zeros_like(array) for name, array in made.items()}
    write(tmp_path / "zzz.safetensors", old | {"more": np.ones(1)}, {})
    source = Checkpoint(tmp_path)
    assert source.keys() == made.keys()
    for name, array in made.items():
        np.testing.assert_array_equal(source[name], array)


def without_keys(path: Path, *keys: str) -> moec.RouterDesc:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({k: config[k] for k in config.keys() - keys}))
    return read_layer(Checkpoint(path), save=ALL).router


def test_missing_keys_mean_what_the_reference_says(tmp_path: Path) -> None:
    folder(tmp_path, "deepseek_v3", experts=16)
    router = without_keys(tmp_path, "n_group", "topk_group")
    assert (router.num_groups, router.top_groups, router.scale) == (8, 4, 2.5)
    edit_config(tmp_path, n_group=None)
    assert read_layer(Checkpoint(tmp_path), save=ALL).router.num_groups == 0
    folder(tmp_path, "qwen3_moe")
    router = without_keys(tmp_path, "norm_topk_prob", "num_experts_per_tok")
    assert (router.norm, router.top_k) == (moec.Norm.NONE, 8)


@pytest.mark.parametrize("other", ["a_backup", "model_ema", "model.fp16", "consolidated"])
def test_of_two_weight_sets_the_model_is_read(tmp_path: Path, other: str) -> None:
    """As transformers does; where no file is model.safetensors both are named."""
    made = folder(tmp_path)
    trebled = {name: 3 * array for name, array in made.items()}
    write(tmp_path / f"{other}.safetensors", trebled, {})
    source = Checkpoint(tmp_path)
    assert source.keys() == made.keys() and len(source.files) == 2
    for name, array in made.items():
        np.testing.assert_array_equal(source[name], array)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    assert all(name in str(caught.value) for name in (f"{other}.saf", "weights.saf", "both have"))
    one = Checkpoint(tmp_path / f"{other}.safetensors")
    np.testing.assert_array_equal(one[EXPERT], trebled[EXPERT])


def test_a_whole_file_comes_before_an_index(tmp_path: Path) -> None:
    """As in transformers."""
    synth.write(synth.make(tiny_shape("qwen3_moe"), dtype="f32", seed=1), tmp_path, shards=2)
    made = synth.make(tiny_shape("qwen3_moe"), dtype="f32")
    rewrite(tmp_path, made)
    np.testing.assert_array_equal(Checkpoint(tmp_path)[EXPERT], made[EXPERT])


def test_shards_without_an_index(tmp_path: Path) -> None:
    made = synth.make(tiny_shape("qwen3_moe"), dtype="f32")
    synth.write(made, tmp_path, shards=3)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert Checkpoint(tmp_path).keys() == made.keys()


def test_synth_replaces_a_model(tmp_path: Path) -> None:
    for seed, shards in ((0, 1), (1, 3), (2, 2), (3, 1)):
        made = synth.make(tiny_shape("qwen3_moe"), dtype="f32", seed=seed)
        synth.write(made, tmp_path, shards=shards)
        source = Checkpoint(tmp_path)
        assert len(source.files) == shards
        for name, array in made.items():
            np.testing.assert_array_equal(source[name], array)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {"a": np.arange(3)}, {})
    mapped = SafetensorsFile(path)["a"]
    write(path, {"a": np.zeros(0, np.int64)}, {})
    np.testing.assert_array_equal(mapped, np.arange(3))
    with pytest.raises(AttributeError):
        write(path, {"a": np.arange(3), "b": BadArray()}, {})
    assert [f.name for f in tmp_path.iterdir()] == ["a.safetensors"]
    assert SafetensorsFile(path)["a"].shape == (0,)


class BadArray:
    """Fails when its data is read."""

    dtype, shape, nbytes = np.dtype(np.int64), (1,), 8

    def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
        raise AttributeError("no data")


def test_arrays_are_not_copied(tmp_path: Path) -> None:
    folder(tmp_path)
    array = Checkpoint(tmp_path)[EXPERT]
    assert not array.flags.owndata and not array.flags.writeable
