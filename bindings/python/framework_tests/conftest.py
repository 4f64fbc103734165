# SPDX-License-Identifier: Apache-2.0
"""What the framework tests share. They run on the installed package; `-m gpu` needs a GPU."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from moec import GateLayout, Save, golden
from moec.checkpoint import Checkpoint
from moec.model import LayerSpec, Matrices, read_layer

FAMILIES = sorted(
    path.stem for path in golden.find_files(golden.default_folder())
    if path.stem != "load_balancing_loss" and path.parent.name != "quant"
)
NAMED = ("qwen3_moe", "gpt_oss", "deepseek_v3", "llama4", "nemotron_h", "longcat_flash")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu run when they are asked for by -m, and only then."""
    if "gpu" not in config.option.markexpr:
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """PyTorch limits how often a process compiles one function: each test begins at zero."""
    if "torch" in sys.modules:
        sys.modules["torch"].compiler.reset()


def dot_error(got: np.ndarray, ref: np.ndarray) -> float:
    """Worst row of ||got - ref|| / max(||ref row||, root mean square of all rows' norms).

    For gradients of routing weights in bf16 on CUDA. Each is an inner product of activations whose
    pre-activations were kept in bf16 with what comes from d_y: its error, some 3e-3 of a typical
    row, does not shrink when its terms cancel, and is 5e-2 to 2e-1 of a row that cancels to 1/50.
    PyTorch's own bf16 arithmetic is off by 1.3e-2 of a typical row, 5e-1 of such a one.
    """
    norms = np.linalg.norm(ref.astype(np.float64), axis=-1)
    errors = np.linalg.norm(got.astype(np.float64) - ref, axis=-1)
    return float((errors / np.maximum(norms, np.sqrt(np.square(norms).mean()))).max())


def golden_layer(family: str) -> tuple[Checkpoint, LayerSpec]:
    """The golden case of a family, understood."""
    checkpoint = Checkpoint(golden.default_folder() / f"{family}.safetensors")
    return checkpoint, read_layer(checkpoint, save=Save.ALL)


def stacked(matrices: Matrices) -> dict[str, np.ndarray]:
    """The matrices of a golden case by WeightSet's names, one array each."""
    found = {}
    for name in matrices.names:
        value = getattr(matrices.arrays, name)
        found[name] = np.stack(value) if isinstance(value, list) else np.array(value)
    return found


def named_gradients(spec: LayerSpec, grads: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gradients by argument name, under the checkpoint's names."""
    out = {"x": grads["x"]}
    for matrices, prefix in ((spec.matrices, ""), (spec.shared, "shared_expert_")):
        for role, names in ({} if matrices is None else matrices.names).items():
            value = grads[prefix + role]
            out |= zip(names, [value] if len(names) == 1 else list(value), strict=True)
    for role, name in spec.names.items():
        if role in grads:
            out[name] = grads[role]
    return out


def compare_gradients(spec: LayerSpec, checkpoint: Checkpoint, got: dict[str, np.ndarray]) -> None:
    """Every gradient of a golden case, per row."""
    found = named_gradients(spec, got)
    for name in checkpoint:
        if name.startswith("g."):
            ref = checkpoint[name]
            value = found["x" if name == "g.x" else f"p.{name[2:]}"]
            value = np.asarray(value, np.float32).reshape(-1, *ref.shape[1:])
            if len(value) < len(ref):  # identity experts have no matrices
                value = np.concatenate([value, np.zeros_like(ref[len(value):])])
            error = golden.row_error(value.reshape(ref.shape), ref)
            assert error <= golden.TOLERANCE, f"{name}: {error:.2e}"


def layouts(spec: LayerSpec) -> dict[str, object]:
    """Layout arguments of MoELayer, and of moec.jax.layer."""
    layout = spec.matrices.layout
    shared = spec.shared.layout.gate_layout if spec.shared else GateLayout.SPLIT
    return {
        "gate_layout": layout.gate_layout, "gate_up_orientation": layout.gate_up_orientation,
        "down_orientation": layout.down_orientation, "shared_gate_layout": shared,
    }
