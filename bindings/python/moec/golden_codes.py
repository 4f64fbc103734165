# SPDX-License-Identifier: Apache-2.0
"""Golden files of quantised experts: the library's own y, gradients of x and of the routing
weights, and values of the matrices."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ._context import Context
from ._descriptors import Activation, ExpertsDesc, PlanDesc
from ._enums import ActivationKind, DType, GateLayout, MatrixName, Orientation, Save
from ._experts import Experts
from ._plan import Plan
from ._tensors import dtype_of, numpy_dtype
from ._weights import Weights
from .checkpoint import CheckpointError, SafetensorsFile
from .matrices import Matrices, read_experts

LIMITS = {DType.BF16: 1e-2, DType.F16: 2e-3}
"""of a row, in the type that the library makes of the codes"""
_ROUNDED_GRADIENTS = 4
"""Times the limit, for a gradient where pre-activations are kept in 16 bits: near the clamp of
gpt-oss the slope is now that of one side, now of the other."""
_STEM = "ckpt.experts."


def is_golden(file: SafetensorsFile) -> bool:
    return {"format", "stack_orientation", "shape_down_proj"} <= file.metadata.keys()


def config_of(metadata: Mapping[str, str]) -> dict[str, Any]:
    """config.json of a model that was published so."""
    library, _, rest = metadata["format"].partition("_")
    group = int(metadata.get("group_size", 0)) or None
    ct_format = {"int8": "int-quantized", "int4": "pack-quantized", "nvfp4": "nvfp4-pack-quantized",
                 "fp8": "float-quantized", "mxfp4": "mxfp4-pack-quantized"}
    section: dict[str, dict[str, Any]] = {
        "bnb": {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "mxfp4": {"quant_method": "mxfp4"},
        "fp8": {"quant_method": "fp8", "weight_block_size": json.loads(
            metadata.get("block", "null"))},
        "ct": {"quant_method": "compressed-tensors",
               "format": ct_format.get(rest.partition("_")[0]),
               "config_groups": {"group_0": {"targets": ["Linear"], "weights": {}}}},
        "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "awq": {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"},
        "gptq": {"quant_method": "gptq", "bits": 4, "group_size": group,
                 "checkpoint_format": metadata.get("checkpoint_format")},
    }
    is_gpt_oss = metadata["activation"] == "gptoss"
    config: dict[str, Any] = {"model_type": "gpt_oss" if is_gpt_oss else "qwen3_moe"}
    if library in section:
        config["quantization_config"] = section[library]
    return config


def read(file: SafetensorsFile) -> Matrices:
    """The experts of a golden file."""
    count, *shape = json.loads(file.metadata["shape_down_proj"])
    turned = file.metadata["stack_orientation"] == "in_out"
    return read_experts(file, _STEM, num_experts=count, hidden=shape[1 if turned else 0],
                        config=config_of(file.metadata))


def pairs(
    context: Context, file: SafetensorsFile
) -> Iterator[tuple[str, np.ndarray, np.ndarray, float | None]]:
    """(name, got, reference, limit; None: that of fp32) of everything in the file."""
    made = read(file)
    library = str(file.metadata.get("lib_dtype"))
    types = [("ref", DType.F32)]
    if library != "None":
        types.append(("ref_lib", dtype_of(library)))
    for prefix, dtype in types:
        weights = _bound(context, made, dtype)
        got, is_rounded = _run(context, file, made, weights, dtype)
        for name, value in got.items():
            ending = "" if prefix == "ref" else f".{dtype.name.lower()}"
            limit = limit_of(name, dtype, is_rounded)
            yield f"{name}{ending}", value, file[f"{prefix}.{_KEYS[name]}"], limit
        if made.is_coded:
            ending, key = ("", "value") if prefix == "ref" else (f".{dtype.name.lower()}",
                                                                 "value_lib")
            for matrix in ("gate_up_proj", "down_proj"):
                index = file[f"dequant.{matrix}.index"]
                values = _stack(weights, made, matrix).reshape(-1)[index]
                wanted = file[f"dequant.{matrix}.{key}"]
                same = values.astype(np.float64) == wanted.astype(np.float64)
                off = np.array([[2 - same.mean()]])  # as an error: the part that is not the same
                yield f"values.{matrix}{ending}", off, np.ones((1, 1)), 0.0


_KEYS = {"y": "y", "x": "dx", "routing_weights": "dweights"}


def limit_of(name: str, dtype: DType, is_rounded: bool) -> float | None:
    """Of y or a gradient in this type, None: that of fp32. is_rounded: pre-activations are."""
    limit = LIMITS.get(dtype)
    return limit * _ROUNDED_GRADIENTS if limit and is_rounded and name != "y" else limit


def _bound(context: Context, made: Matrices, dtype: DType) -> Weights:
    if made.is_coded:
        return made.weights(context, frozen=True, dtype=dtype)
    for name in made.names:
        value = getattr(made.arrays, name)
        setattr(made.arrays, name, value.astype(numpy_dtype(dtype)))
    return made.weights(context, frozen=True)


def _run(
    context: Context, file: SafetensorsFile, made: Matrices, weights: Weights, dtype: DType
) -> tuple[dict[str, np.ndarray], bool]:
    """The results, and whether 16 bits are kept between products."""
    tokens, top_k = file["ids"].shape
    kinds = {"gptoss": ActivationKind.GPTOSS, "swiglu": ActivationKind.SWIGLU}
    kind = kinds.get(file.metadata["activation"])
    if kind is None:
        raise CheckpointError(f"{file.path}: activation {file.metadata['activation']!r}; "
                              f"{', '.join(kinds)} are known")
    experts = Experts(context, ExpertsDesc(
        hidden=made.hidden, inter=made.inter, num_experts=made.count, top_k=top_k, dtype=dtype,
        activation=Activation(kind=kind), save=Save.ALL))
    plan = Plan(context, PlanDesc(max_tokens=tokens, num_experts=made.count, top_k=top_k))
    plan.from_topk(context.asarray(np.array(file["ids"])), context.asarray(file["weights"]))
    x, d_y = (context.asarray(file[name].astype(numpy_dtype(dtype))) for name in ("x", "dy"))
    result = experts.forward(plan, x, weights)
    grads = experts.backward(result, d_y)
    found = {"y": result.y, "x": grads.x, "routing_weights": grads.routing_weights}
    is_rounded = experts.describe(tokens, weights)["backward"]["between_products"] != "f32"
    return {name: np.asarray(value, np.float32) for name, value in found.items()}, is_rounded


def _stack(weights: Weights, made: Matrices, matrix: str) -> np.ndarray:
    """The values of all experts as the file's stack has them."""
    def one(name: MatrixName, orientation: Orientation) -> np.ndarray:
        parts = [np.asarray(weights.dequantise(name, e)) for e in range(made.count)]
        stack = np.stack(parts)
        return stack.swapaxes(1, 2) if orientation == Orientation.IN_OUT else stack

    layout = made.layout
    if matrix == "down_proj":
        return _as_published(one(MatrixName.DOWN, layout.down_orientation), made)
    if layout.gate_layout == GateLayout.SPLIT:
        stack = np.concatenate([one(MatrixName.GATE, layout.gate_up_orientation),
                                one(MatrixName.UP, layout.gate_up_orientation)], 1)
    else:
        stack = one(MatrixName.GATE_UP, layout.gate_up_orientation)
    return _as_published(stack, made)


def _as_published(stack: np.ndarray, made: Matrices) -> np.ndarray:
    """[E,N,K], or [E,K,N] where the family has its plain matrices so."""
    is_gpt_oss = made.layout.gate_layout == GateLayout.INTERLEAVED
    return np.ascontiguousarray(stack.swapaxes(1, 2) if is_gpt_oss else stack)
