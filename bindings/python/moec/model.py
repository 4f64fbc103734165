# SPDX-License-Identifier: Apache-2.0
"""One MoE layer of a checkpoint: its tensors, what they mean, and moec objects over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import numpy as np

from . import layer_names
from ._context import Context
from ._descriptors import Activation, ExpertsDesc, RouterDesc
from ._enums import DeviceType, DType, ExpertsDescFlags, RouterFlags, Save, Select, Shared
from ._layer import Layer, LayerResult
from ._tensors import Array, dtype_of
from .checkpoint import Checkpoint, CheckpointError
from .families import BY_MODEL_TYPE
from .family import Family, Key
from .kinds import has_tensors
from .matrices import Matrices, collect

_FLOATS = {DType.F32, DType.F16, DType.BF16}
_FLAG_OF = {
    "gate_bias": RouterFlags.LOGIT_BIAS,
    "select_bias": RouterFlags.SELECT_BIAS,
    "per_expert_scale": RouterFlags.PER_EXPERT_SCALE,
}
NUM_EXPERTS = Key("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = Key("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k",
            "top_k_experts")
ZERO_EXPERTS = Key("zero_expert_num", default=0)
HIDDEN = Key("hidden_size", "d_model")


def family_of(config: Mapping[str, Any]) -> Family:
    """The row of the families table that config.json's model_type names."""
    name = str(config.get("model_type"))
    if name not in BY_MODEL_TYPE:
        close = get_close_matches(name, BY_MODEL_TYPE, 1)
        hint = f"did you mean {close[0]}?" if close else f"{', '.join(BY_MODEL_TYPE)} are known"
        raise CheckpointError(f"model_type {name!r} is not in the families table; {hint}")
    return BY_MODEL_TYPE[name]


@dataclass
class LayerSpec:
    """What a checkpoint says about one of its MoE layers."""

    family: Family
    number: int
    router: RouterDesc
    experts: ExpertsDesc
    names: dict[str, str]
    """argument of Layer.forward -> tensor name"""
    inputs: dict[str, np.ndarray]
    matrices: Matrices
    shared: Matrices | None
    name: str = ""
    """the layer's full prefix"""
    layers: list[layer_names.LayerName] = field(default_factory=list)
    """all layers with experts, drafts too"""


class _Block:
    """The tensors of one layer, and which of them have been understood."""

    def __init__(
        self, tensors: Mapping[str, np.ndarray], layer: str, family: Family,
        config: Mapping[str, Any],
    ) -> None:
        self.tensors, self.stem = tensors, f"{layer}."
        bases = [f"{self.stem}{block}.".replace("..", ".") for block in family.blocks]
        routers = family.tensors["gate_weight"]
        found = [base for base in bases if any(base + name in tensors for name in routers)]
        self.base = found[0] if found else self.stem  # a golden file has no block
        self.config: Mapping[str, Any] | None = config
        self.used: set[str] = set()

    def path(self, name: str) -> str:
        return self.stem + name[3:] if name.startswith("../") else self.base + name

    def find(self, names: tuple[str, ...]) -> str | None:
        return next((self.path(n) for n in names if self.path(n) in self.tensors), None)

    def take(self, path: str) -> np.ndarray:
        self.used.add(path)
        array = self.tensors[path]
        if dtype_of_or_none(array) not in _FLOATS:
            raise CheckpointError(f"{path} is {array.dtype}; F32, F16 and BF16 can be run")
        return array

    def leftovers(self) -> list[str]:
        return sorted(n for n in self.tensors if n.startswith(self.base) and n not in self.used)

    def unread_experts(self) -> list[str]:
        """Of a block that has more than its experts."""
        parts = ("experts.", "_exps.", "_shexp.")
        return [n for n in self.leftovers() if any(p in n[len(self.base) - 1 :] for p in parts)]


def dtype_of_or_none(array: np.ndarray) -> DType | None:
    """DType of an array, None when moec has no such type."""
    try:
        return dtype_of(array.dtype)
    except TypeError:
        return None


def read_layer(
    checkpoint: Checkpoint, layer: int | str | None = None, *, save: Save, dtype: Any = None
) -> LayerSpec:
    """Find and understand one MoE layer: a number of the model's own, the name of any ("mtp.0"), or
    None for the model's first. dtype: of x, and of the values of codes; None: what the config says,
    else that of the router. Raises CheckpointError."""
    family = getattr(checkpoint, "family", None) or family_of(checkpoint.config)
    layers = layer_names.find(checkpoint, family)
    if not layers:
        wanted = " or ".join(family.tensors["gate_weight"])
        raise CheckpointError(
            f"{checkpoint.path}: no MoE layer of {family.model_types[0]}: no layer has "
            f"{family.block or 'a block'}.{wanted}; found e.g. {', '.join(list(checkpoint)[:3])}"
        )
    chosen = layer_names.choose(layers, layer, family)
    block = _Block(checkpoint, chosen.full, family, checkpoint.config)
    kind = None if dtype is None else dtype_of(dtype)
    try:
        spec = _understand(block, family, checkpoint.config, chosen.number, save, kind)
    except (ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from None
    left = block.leftovers() if family.strict else block.unread_experts()
    if left:
        shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
        raise CheckpointError(
            f"{checkpoint.path}: {family.model_types[0]} has no place for {shown}; "
            "extended blocks are not supported"
        )
    spec.name, spec.layers = chosen.full, layers
    return spec


def _understand(
    block: _Block, family: Family, config: Mapping[str, Any], number: int, save: Save,
    dtype: DType | None,
) -> LayerSpec:
    names: dict[str, str] = {}
    for role, choices in family.tensors.items():
        found = block.find(choices)
        if found is not None:
            names[role] = found
        elif role not in family.optional:
            raise CheckpointError(f"{role} is missing: no {' or '.join(map(block.path, choices))}")
    inputs = {role: block.take(name) for role, name in names.items()}
    if "select_bias" in inputs:
        if config.get("use_expert_bias") is False:
            del inputs["select_bias"], names["select_bias"]
        else:  # the API wants fp32 [E+Z]; some store bf16 or [1,E]
            inputs["select_bias"] = inputs["select_bias"].astype(np.float32).reshape(-1)
    num_ids, hidden = inputs["gate_weight"].shape
    num_experts = int(NUM_EXPERTS.read(config, number))
    zeros = int(ZERO_EXPERTS.read(config, number))
    if num_ids != num_experts + zeros:
        raise CheckpointError(
            f"{names['gate_weight']} has {num_ids} rows; the config says {num_experts} experts "
            f"and {zeros} identity experts"
        )
    if zeros and config.get("zero_expert_type", "identity") != "identity":
        raise CheckpointError(f"zero_expert_type {config['zero_expert_type']!r}; identity is known")
    matrices = collect(block, family.layouts, num_experts, hidden, "the experts")
    for e in range(num_experts, num_experts + zeros):  # transformers writes rows that nobody reads
        block.used |= {block.path(name.format(e=e)) for name in matrices.layout.names.values()}
    shared = _shared(block, family, config, number, hidden)
    inter = matrices.inter
    dtype = _data_type(matrices, inputs["gate_weight"], config, dtype)
    for role in ("shared_gate", "shared_gate_bias", "output_bias"):
        if role in inputs and dtype_of(inputs[role]) not in (dtype, DType.F32):
            inputs[role] = inputs[role].astype(np.float32)  # of the type of x, or fp32
    top_k = int(TOP_K.read(config, number))
    router = _router(family, config, number, names, dtype,
                     num_experts=num_experts, num_zero_experts=zeros, top_k=top_k)
    flags = ExpertsDescFlags.NONE if matrices.is_coded else ExpertsDescFlags.PLAIN_WEIGHTS
    experts = ExpertsDesc(
        hidden=hidden, inter=inter, num_experts=num_experts, num_zero_experts=zeros, top_k=top_k,
        gate_layout=matrices.layout.gate_layout, dtype=dtype, save=save,
        activation=_activation(family.activation, config, number),
        shared=family.shared if shared else Shared.NONE,
        shared_inter=shared.inter if shared else 0,
        shared_activation=_activation(
            family.shared_activation or family.activation, config, number
        ) if shared else Activation(),
        flags=flags,
        **resolve(family.experts, config, number),
    )
    return LayerSpec(family, number, router, experts, names, inputs, matrices, shared)


_TYPES = {"float32": DType.F32, "float16": DType.F16, "bfloat16": DType.BF16}


def _data_type(
    matrices: Matrices, router: np.ndarray, config: Mapping[str, Any], wanted: DType | None
) -> DType:
    """The type of x and of the experts' values: that of plain experts; of codes the wanted one,
    the config's, or the router's."""
    if not matrices.is_coded:
        dtype = dtype_of(matrices.arrays.down[0])  # type: ignore[index]
        if wanted not in (None, dtype):
            raise CheckpointError(
                f"the experts are plain {dtype.name.lower()}; a type is chosen for codes alone"
            )
        return dtype
    said = _TYPES.get(str(config.get("dtype") or config.get("torch_dtype")))
    return wanted or said or dtype_of(router)


def resolve(row: Mapping[str, Any], config: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """A table row with its Keys read."""
    return {k: v.read(config, layer) if isinstance(v, Key) else v for k, v in row.items()}


def _activation(row: Mapping[str, Any], config: Mapping[str, Any], layer: int) -> Activation:
    values = resolve(row, config, layer)
    if "limit" in row and not values["limit"]:  # a clamp that the config switches off
        return Activation()
    return Activation(**values)


def _router(
    family: Family, config: Mapping[str, Any], layer: int, names: Mapping[str, str],
    dtype: DType, **sizes: Any,
) -> RouterDesc:
    values = resolve(family.router, config, layer)
    if values.get("num_groups", 0) <= 1:  # one group is no limit
        values["selection"] = values.get("selection", Select.TOPK)
        if values["selection"] == Select.GROUP_TOPK:
            values["selection"] = Select.TOPK
        values |= {"num_groups": 0, "top_groups": 0, "group_top_m": 0}
        values.pop("group_fill", None)
    flags = RouterFlags.NONE
    for role in names:
        flags |= _FLAG_OF.get(role, RouterFlags.NONE)
    return RouterDesc(flags=flags, data_dtype=dtype, **sizes, **values)


def _shared(
    block: _Block, family: Family, config: Mapping[str, Any], layer: int, hidden: int
) -> Matrices | None:
    if family.shared == Shared.NONE:
        return None
    expected = family.shared_count is not None and family.shared_count.read(config, layer)
    present = any(
        has_tensors(block.tensors, block.path(name))
        for layout in family.shared_layouts
        for name in layout.names.values()
    )
    if not present and not expected:
        return None
    return collect(block, family.shared_layouts, 1, hidden, "the shared expert's matrices")


class MoeLayer:
    """A LayerSpec on a context's device with its weights bound: forward, and gradients under the
    checkpoint's names. NumPy arrays that it is given go there; results stay there, and
    numpy.asarray() reads them."""

    def __init__(self, context: Context, spec: LayerSpec, *, frozen: bool) -> None:
        self.context, self.spec = context, spec
        self.inputs = {role: context.asarray(array) for role, array in spec.inputs.items()}
        self.layer = Layer(context, spec.router, spec.experts)
        dtype = spec.experts.dtype
        self.weights = spec.matrices.weights(context, frozen=frozen, dtype=dtype)
        self.shared = None if spec.shared is None else spec.shared.weights(
            context, frozen=frozen, dtype=dtype)

    def forward(self, x: Array, **options: Any) -> LayerResult:
        return self.layer.forward(self.context.asarray(x), self.weights,
                                  shared_weights=self.shared, **(self.inputs | options))

    def pack(self) -> None:
        """Make the packed copies of frozen weights that a CPU reads faster. A GPU reads the arrays
        that are held anyway."""
        if self.context.device_type != DeviceType.CPU:
            return
        for weights in (self.weights, self.shared):
            if weights is not None and weights.info().packed_bytes:
                weights.pack()

    def backward(self, result: LayerResult, d_y: Array) -> dict[str, Array]:
        """Gradient of x (as "x") and of every parameter, by tensor name."""
        grads = self.layer.backward(result, self.context.asarray(d_y))
        out: dict[str, Any] = {"x": grads.x} | self.spec.matrices.named(grads.expert_weights)
        if self.spec.shared is not None:
            out |= self.spec.shared.named(grads.shared_weights)
        for role, name in self.spec.names.items():
            value = getattr(grads, role, None)
            if value is not None:
                out[name] = value
        return out

