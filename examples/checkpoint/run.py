# SPDX-License-Identifier: Apache-2.0
"""Run one layer of a checkpoint folder, without a framework.

    python run.py                 # a small layer, written as Qwen3-MoE is published
    python run.py FOLDER LAYER    # a published one: "model.safetensors" or shards, and config.json
"""

import json
import sys
import tempfile
from pathlib import Path

import moec
import numpy as np
from moec import checkpoint

CONFIG = {"model_type": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 48,
          "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}


def write_small(folder):
    """One layer, one tensor an expert, bf16: the names of the published files."""
    rng = np.random.default_rng(0)
    hidden, inter = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"]
    shapes = {"gate.weight": (CONFIG["num_experts"], hidden)}
    for e in range(CONFIG["num_experts"]):
        for name, shape in (("gate_proj", (inter, hidden)), ("up_proj", (inter, hidden)),
                            ("down_proj", (hidden, inter))):
            shapes[f"experts.{e}.{name}.weight"] = shape
    bf16 = moec.numpy_dtype("bf16")
    tensors = {f"model.layers.0.mlp.{name}": rng.normal(0, 0.1, shape).astype(bf16)
               for name, shape in shapes.items()}
    checkpoint.write(folder / "model.safetensors", tensors, {})
    (folder / "config.json").write_text(json.dumps(CONFIG))


def run(folder, layer):
    tensors = checkpoint.Checkpoint(folder)  # maps the files; sharded or not
    config, block = tensors.config, f"model.layers.{layer}.mlp."
    sizes = {"num_experts": config["num_experts"], "top_k": config["num_experts_per_tok"]}
    hidden, inter = config["hidden_size"], config["moe_intermediate_size"]

    context = moec.Context()
    found = moec.read_experts(tensors, block + "experts.", num_experts=sizes["num_experts"],
                              hidden=hidden, config=config)
    norm = moec.Norm.SUM if config["norm_topk_prob"] else moec.Norm.NONE
    router = moec.RouterDesc(norm=norm, **sizes)
    experts = moec.ExpertsDesc(hidden=hidden, inter=inter, dtype="bf16", **sizes)
    whole = moec.Layer(context, router, experts)

    x = np.random.default_rng(1).standard_normal((16, hidden)).astype(moec.numpy_dtype("bf16"))
    weights = found.weights(context, frozen=True)
    out = whole.forward(x, weights, tensors[block + "gate.weight"],
                        want=("expert_ids", "routing_weights"))
    return tensors, block, x, out


def by_hand(tensors, block, x, ids, weights):
    """y of one token in plain NumPy."""
    y = 0
    for e, weight in zip(ids, weights, strict=True):
        gate, up, down = (tensors[f"{block}experts.{e}.{name}_proj.weight"].astype("f4")
                          for name in ("gate", "up", "down"))
        g = gate @ x
        y += weight * (down @ (g / (1 + np.exp(-g)) * (up @ x)))
    return y


def main():
    if len(sys.argv) == 3:
        _, _, x, out = run(Path(sys.argv[1]), sys.argv[2])
        print(f"x {x.shape} -> y {out.y.shape}, mean square {np.square(out.y.astype('f4')).mean()}")
        return
    with tempfile.TemporaryDirectory() as folder:
        write_small(Path(folder))
        tensors, block, x, out = run(Path(folder), 0)
        wanted = by_hand(tensors, block, x[0].astype("f4"), out.expert_ids[0],
                         out.routing_weights[0])
        y = out.y[0].astype("f4")
        error = np.linalg.norm(y - wanted) / np.linalg.norm(wanted)
        print(f"token 0 goes to experts {out.expert_ids[0].tolist()}; beside NumPy: {error:.1e}")
        assert error < 1e-2


if __name__ == "__main__":
    main()
