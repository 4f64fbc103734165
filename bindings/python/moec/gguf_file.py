# SPDX-License-Identifier: Apache-2.0
"""GGUF files, read through the package gguf: the tensors under their own names, the types of their
codes, and the families table's rows as these files name things."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ._enums import GateLayout
from .checkpoint import CheckpointError, flat_config
from .families import BY_MODEL_TYPE
from .family import Family, Layout
from .kinds import GGUF_KINDS

_PARTS = {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
_WEIGHTS = {part: f"{name}_exps.weight" for part, name in _PARTS.items()}
_BIASES = {f"{part}_bias": f"{name}_exps.bias" for part, name in _PARTS.items()}
_SHARED = Layout({part: f"{name}_shexp.weight" for part, name in _PARTS.items()}, GateLayout.SPLIT)
TENSORS: Mapping[str, tuple[str, ...]] = {
    "gate_weight": ("ffn_gate_inp.weight",), "gate_bias": ("ffn_gate_inp.bias",),
    "select_bias": ("exp_probs_b.bias", "exp_probs_b"),
    "shared_gate": ("ffn_gate_inp_shexp.weight",),
}
"""role -> what it is called in a block"""
_Values = Callable[[str, Any], Any]
_KNOWN = {kind.name.removeprefix("gguf-").upper(): kind.name for kind in GGUF_KINDS}


def _mixtral(value: _Values) -> dict[str, Any]:
    return {"model_type": "mixtral", "num_local_experts": value("expert_count", None)}


def _qwen(model_type: str, norm: bool) -> Callable[[_Values], dict[str, Any]]:
    return lambda value: {"model_type": model_type, "norm_topk_prob": norm}


def _gpt_oss(value: _Values) -> dict[str, Any]:
    return {"model_type": "gpt_oss", "num_local_experts": value("expert_count", None)}


def _deepseek(v3: str, v2: str | None = None) -> Callable[[_Values], dict[str, Any]]:
    def config(value: _Values) -> dict[str, Any]:
        groups, score = value("expert_group_count", 1), value("expert_gating_func", 2 - bool(v2))
        model_type = v3 if score == 2 or v2 is None else v2
        return {
            "model_type": model_type, "n_routed_experts": value("expert_count", None),
            "n_shared_experts": value("expert_shared_count", 0), "n_group": groups,
            "topk_group": value("expert_group_used_count", 1),
            "norm_topk_prob": bool(value("expert_weights_norm", False)),
            "routed_scaling_factor": value("expert_weights_scale", 1.0),
            "scoring_func": {1: "softmax", 2: "sigmoid"}.get(score, f"number {score}"),
            "topk_method": "noaux_tc" if model_type == v3 else
                           "group_limited_greedy" if groups > 1 else "greedy",
        }

    return config


ARCHITECTURES: dict[str, Callable[[_Values], dict[str, Any]]] = {
    "llama": _mixtral, "qwen2moe": _qwen("qwen2_moe", False), "qwen3moe": _qwen("qwen3_moe", True),
    "olmoe": _qwen("olmoe", False), "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek("deepseek_v3", "deepseek_v2"), "dots1": _deepseek("dots1"),
    "glm4moe": _deepseek("glm4_moe"),
}
"""general.architecture -> the keys of config.json that these files have as metadata, or that
ggml's code fixes"""


_OF_TYPES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe",
             "olmoe": "olmoe", "gpt_oss": "gpt-oss", "deepseek_v2": "deepseek2",
             "deepseek_v3": "deepseek2", "dots1": "dots1", "glm4_moe": "glm4moe"}


def architecture_of(config: Mapping[str, Any]) -> str:
    """general.architecture of a model type. ValueError for one that is not known."""
    name = str(config["model_type"])
    if name not in _OF_TYPES:
        known = ", ".join(_OF_TYPES)
        raise ValueError(f"GGUF files of {name} are not known, those of {known} are")
    return _OF_TYPES[name]


def family_of(config: Mapping[str, Any]) -> Family:
    """The families table's row of a model type, as GGUF files name its tensors."""
    family = BY_MODEL_TYPE[str(config["model_type"])]
    has_bias = any("down_bias" in layout.names for layout in family.layouts)
    return replace(
        family, block="", prefix="blk", strict=False,
        tensors={role: TENSORS[role] for role in family.tensors},
        layouts=(Layout(_WEIGHTS | (_BIASES if has_bias else {}), GateLayout.SPLIT),),
        shared_layouts=(_SHARED,) if family.shared_layouts else (),
    )


class GgufFile(Mapping[str, np.ndarray]):
    """A file as checkpoint.Checkpoint has one: name -> read-only array. Codes are u8
    [E,N,bytes]; `kinds` says of which kind they are."""

    is_golden = False

    def __init__(self, path: Path, config: str | Path | None = None) -> None:
        self.path = path
        reader = self._open(path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        types = {name: tensor.tensor_type.name for name, tensor in self._tensors.items()}
        self.kinds = {name: _KNOWN[kind] for name, kind in types.items() if kind in _KNOWN}
        self._refused = {name: kind for name, kind in types.items()
                         if kind not in (*_KNOWN, "F32", "F16", "BF16")}
        self.config = self._read_config(reader)
        if config is not None:
            try:
                self.config |= flat_config(json.loads(Path(config).read_text()))
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{config}: not a config.json: {error}") from None
        self.config.pop("quantization_config", None)  # of another file than this one
        self.family = family_of(self.config)

    @property
    def files(self) -> list[Path]:
        return [self.path]

    @staticmethod
    def _open(path: Path) -> Any:
        try:
            import gguf  # type: ignore[import-not-found, unused-ignore]
        except ModuleNotFoundError:
            raise CheckpointError(
                f"{path}: GGUF files are read by the package gguf, which is not installed: "
                "pip install 'moec[gguf]'"
            ) from None
        try:
            return gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise CheckpointError(f"{path}: not a GGUF file: {error}") from None

    def _read_config(self, reader: Any) -> dict[str, Any]:
        def field(name: str) -> Any:
            found = reader.fields.get(name)
            return None if found is None else found.contents()

        name = str(field("general.architecture"))
        if name not in ARCHITECTURES:
            raise CheckpointError(
                f"{self.path}: architecture {name!r}; {', '.join(ARCHITECTURES)} are known"
            )

        def value(key: str, default: Any) -> Any:
            found = field(f"{name}.{key}")
            return default if found is None else found

        experts = value("expert_count", None)
        if not experts:
            raise CheckpointError(f"{self.path}: a model of {name} without experts")
        return {
            "hidden_size": value("embedding_length", None), "num_experts": experts,
            "num_experts_per_tok": value("expert_used_count", None),
        } | ARCHITECTURES[name](value)

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        if name in self._refused:
            known = ", ".join(["F32", "F16", "BF16", *_KNOWN])
            raise CheckpointError(
                f"{self.path}: {name} is {self._refused[name]}; {known} are supported"
            )
        array = np.asarray(tensor.data).view(np.ndarray)
        if tensor.tensor_type.name == "BF16":
            array = array.view(ml_dtypes.bfloat16)
        return array[None] if name.endswith("inp_shexp.weight") and array.ndim == 1 else array

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def write(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray],
    kinds: Mapping[str, str],
) -> int:
    """Write a GGUF file of these tensors; returns bytes. CheckpointError without gguf."""
    try:
        import gguf
    except ModuleNotFoundError:
        raise CheckpointError(
            "GGUF files are written by the package gguf, which is not installed: "
            "pip install 'moec[gguf]'"
        ) from None
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add = {bool: writer.add_bool, float: writer.add_float32}.get(type(value), writer.add_uint32)
        add(f"{architecture}.{key}", value)
    names = {kind: name for name, kind in _KNOWN.items()}
    for name, array in tensors.items():
        raw = getattr(gguf.GGMLQuantizationType, names[kinds[name]]) if name in kinds else None
        if array.dtype == ml_dtypes.bfloat16:
            array, raw = array.view(np.uint8), gguf.GGMLQuantizationType.BF16
        writer.add_tensor(name, np.ascontiguousarray(array), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.stat().st_size


def write_layer(
    path: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any],
    kinds: Mapping[str, str],
) -> int:
    """Write a layer in a file's names, with the metadata that its config becomes."""
    architecture = architecture_of(config)
    count, inter = next(a.shape[:2] for name, a in tensors.items() if "ffn_up_exps" in name)
    top_k = next(value for key, value in config.items() if key in ("num_experts_per_tok", "moe_k"))
    metadata: dict[str, Any] = {
        "block_count": 1, "embedding_length": config["hidden_size"], "expert_count": count,
        "expert_used_count": top_k, "expert_feed_forward_length": inter,
    }
    if architecture in ("deepseek2", "dots1", "glm4moe"):
        metadata |= {
            "expert_gating_func": 1 if config["model_type"] == "deepseek_v2" else 2,
            "expert_weights_norm": bool(config.get("norm_topk_prob", False)),
            "expert_weights_scale": float(config.get("routed_scaling_factor", 1.0)),
            "expert_shared_count": int(any("_shexp" in name for name in tensors)),
        }
        if config.get("n_group", 1) > 1:
            metadata |= {"expert_group_count": config["n_group"],
                         "expert_group_used_count": config["topk_group"]}
    return write(path, architecture, metadata, tensors, kinds)


def open_checkpoint(path: str | Path, config: str | Path | None = None) -> Any:
    """A safetensors file or folder, or a GGUF file: one, or the only one of a folder."""
    from .checkpoint import Checkpoint

    place = Path(path)
    found = sorted(place.glob("*.gguf")) if place.is_dir() else []
    if place.is_dir() and found and not any(place.glob("*.safetensors")):
        if len(found) > 1:
            raise CheckpointError(
                f"{place}: {len(found)} GGUF files; give one of them, such as {found[0].name}"
            )
        place = found[0]
    return GgufFile(place, config) if place.suffix == ".gguf" else Checkpoint(place, config)
