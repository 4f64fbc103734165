# SPDX-License-Identifier: Apache-2.0
"""Descriptors as frozen dataclasses: fields as in moec.h, a misspelt one raises TypeError.

Zero is a field's default, as in C; fields without a default have to be given. An element type is a
DType or its name, such as "bf16".
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from . import _raw
from ._enums import (
    ActivationKind,
    ActRounding,
    Combine,
    Drop,
    DType,
    ExpertsDescFlags,
    GateLayout,
    GroupFill,
    Norm,
    Orientation,
    PlanKind,
    Precision,
    RouterFlags,
    RouterInput,
    Save,
    Scheme,
    Score,
    Select,
    Shared,
    SlotOrder,
    WeightPosition,
    WeightRule,
    WeightsFlags,
)
from ._tensors import dtype_of, kind_of


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterDesc:
    """How logits [T,E+Z] become K expert ids and weights per token (moec_router_desc)."""

    num_experts: int
    top_k: int
    flags: RouterFlags = RouterFlags.NONE
    num_zero_experts: int = 0
    input: RouterInput = RouterInput.PLAIN
    rms_eps: float = 0.0
    jitter: float = 0.0
    logit_precision: Precision = Precision.FP32
    logit_softcap: float = 0.0
    score: Score = Score.SOFTMAX
    score_precision: Precision = Precision.FP32
    selection: Select = Select.TOPK
    num_groups: int = 0
    top_groups: int = 0
    group_top_m: int = 0
    group_fill: GroupFill = GroupFill.NEG_INF
    mixer_eps: float = 0.0
    weight_rule: WeightRule = WeightRule.SCORE
    norm: Norm = Norm.NONE
    norm_eps: float = 0.0
    norm_p: float = 0.0
    norm_precision: Precision = Precision.FP32
    scale: float = 0.0
    weight_precision: Precision = Precision.FP32
    slot_order: SlotOrder = SlotOrder.BY_VALUE
    data_dtype: DType | str | int = 0
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Activation:
    """An activation and its parameters; those that the kind does not use stay 0."""

    kind: ActivationKind = ActivationKind.SWIGLU
    alpha: float = 0.0
    limit: float = 0.0
    offset: float = 0.0
    beta: float = 0.0
    linear_beta: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanDesc:
    """Bounds of a plan (moec_plan_desc): max_tokens fixes every buffer size."""

    max_tokens: int
    num_experts: int
    top_k: int
    num_zero_experts: int = 0
    kind: PlanKind = PlanKind.TOPK
    expert_begin: int = 0
    expert_end: int = 0
    align: int = 0
    drop: Drop = Drop.NONE
    capacity: int = 0
    capacity_factor: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsDesc:
    """Layout of the matrices of a set of experts (moec_weights_desc)."""

    num_experts: int
    hidden: int
    inter: int
    gate_layout: GateLayout = GateLayout.GATE_THEN_UP
    flags: WeightsFlags = WeightsFlags.NONE
    gate_up_orientation: Orientation = Orientation.OUT_IN
    down_orientation: Orientation = Orientation.OUT_IN
    dtype: DType | str = DType.F32
    bias_dtype: DType | str | int = 0
    gate_up_scheme: Scheme = Scheme.NONE
    down_scheme: Scheme = Scheme.NONE


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptersDesc:
    """Sizes of the experts that adapters are beside (moec_adapters_desc)."""

    num_experts: int
    hidden: int
    inter: int
    gate_layout: GateLayout = GateLayout.GATE_THEN_UP


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsDesc:
    """What the experts compute (moec_experts_desc). Save.NONE means inference only;
    flags=ExpertsDescFlags.PLAIN_WEIGHTS makes workspaces smaller, and refuses quantised weights."""

    hidden: int
    inter: int
    num_experts: int
    top_k: int
    shared_inter: int = 0
    num_zero_experts: int = 0
    expert_begin: int = 0
    expert_end: int = 0
    align: int = 0
    max_rows_base: int = 0
    gate_layout: GateLayout = GateLayout.GATE_THEN_UP
    dtype: DType | str = DType.F32
    activation: Activation = field(default_factory=Activation)
    shared_activation: Activation = field(default_factory=Activation)
    weight_position: WeightPosition = WeightPosition.ON_OUTPUT
    combine: Combine = Combine.FP32_SLOT
    act_rounding: ActRounding = ActRounding.FP32_ONCE
    shared: Shared = Shared.NONE
    save: Save = Save.NONE
    output_scale: float = 0.0
    flags: ExpertsDescFlags = ExpertsDescFlags.NONE


def to_raw(desc: Any, kind: type, name: str = "desc") -> Any:
    """Copy a dataclass, the argument `name`, field by field, into the struct of the same fields.
    Raises TypeError or OverflowError, naming the argument or the field."""
    wanted = kind.__name__.removeprefix("moec_").title().replace("_", "")
    if type(desc).__name__ != wanted:
        raise TypeError(f"moec: {name} is {kind_of(desc)}; a moec.{wanted} is needed")
    raw = kind()
    for item in fields(desc):
        value = given = getattr(desc, item.name)
        if isinstance(value, Activation):
            value = to_raw(value, _raw.moec_activation)
        elif isinstance(value, str) and "DType" in str(item.type):
            value = dtype_of(value)
        try:
            setattr(raw, item.name, value)
        except TypeError:
            text = f"moec: {wanted}.{item.name} is {given!r}; {item.type} is needed"
            raise TypeError(text) from None
        except OverflowError as error:
            raise OverflowError(f"moec: {wanted}.{item.name}: {error}") from None
    return raw
