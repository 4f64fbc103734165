# SPDX-License-Identifier: Apache-2.0
"""Golden files of quantised experts as folders that a library published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from moec import golden, golden_codes, synth
from moec.checkpoint import SafetensorsFile, write

BLOCK = "model.layers.0.mlp."
FILES = {path.stem: path for path in golden.find_files(golden.default_folder())
         if path.parent.name == "quant"}


def tensors_of(name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors under their published names, with a router, and config.json's content."""
    file = SafetensorsFile(FILES[name])
    count, *shape = json.loads(file.metadata["shape_down_proj"])
    hidden = file["x"].shape[1]
    config = golden_codes.config_of(file.metadata) | {
        "hidden_size": hidden, "num_experts": count, "num_local_experts": count,
        "num_experts_per_tok": file["ids"].shape[1], "norm_topk_prob": True,
        "torch_dtype": "float32",
    }
    tensors = {BLOCK + key.removeprefix("ckpt."): np.array(file[key])
               for key in file if key.startswith("ckpt.")}
    rng = np.random.default_rng(len(name))
    gate = rng.standard_normal((count, hidden), np.float32)
    if config["model_type"] == "gpt_oss":
        tensors |= {f"{BLOCK}router.weight": gate, f"{BLOCK}router.bias": gate[:, 0].copy()}
    else:
        tensors[f"{BLOCK}gate.weight"] = gate
    return tensors, config


def publish(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    write(folder / "model.safetensors", tensors, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def made_by_synth(scheme: str, folder: Path, **options: Any) -> Path:
    made = synth.make(synth.tiny_shape(scheme), scheme=scheme, **options)
    synth.write(made, folder)
    return folder
