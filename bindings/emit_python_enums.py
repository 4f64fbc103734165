# SPDX-License-Identifier: Apache-2.0
"""Python: an enum class for each enum of moec.h. Its members are the constants by their names in C
without the prefix. A class of flags also has NONE, 0."""

import sys

HEAD = '''# SPDX-License-Identifier: Apache-2.0
# {name}
"""The constants of moec.h, one enum each; values come from the header, so they cannot drift."""

from __future__ import annotations

from enum import IntEnum, IntFlag

from . import _raw
'''
CLASSES = {  # enum of moec.h: class, prefix of its constants, docstring
    "moec_dtype_value": ("DType", "MOEC_", "Element types, with DLPack's values."),
    "moec_device_type": ("DeviceType", "MOEC_", "Kinds of memory, with DLPack's values."),
    "moec_log_level": ("LogLevel", "MOEC_LOG_"),
    "moec_context_flags": ("ContextFlags", "MOEC_CONTEXT_"),
    "moec_math_mode": ("MathMode", "MOEC_MATH_"),
    "moec_router_input": ("RouterInput", "MOEC_INPUT_"),
    "moec_precision": ("Precision", "MOEC_PREC_"),
    "moec_score": ("Score", "MOEC_SCORE_"),
    "moec_select": ("Select", "MOEC_SELECT_"),
    "moec_group_fill": ("GroupFill", "MOEC_FILL_"),
    "moec_weight_rule": ("WeightRule", "MOEC_WEIGHT_"),
    "moec_norm": ("Norm", "MOEC_NORM_"),
    "moec_slot_order": ("SlotOrder", "MOEC_SLOT_"),
    "moec_router_flags": ("RouterFlags", "MOEC_ROUTER_"),
    "moec_grad_flags": (
        "GradFlags", "MOEC_GRAD_",
        "SKIP_IDLE: Router.gate_backward leaves out tokens whose row of d_logits is 0."),
    "moec_experts_desc_flags": (
        "ExpertsDescFlags", "MOEC_EXPERTS_",
        "PLAIN_WEIGHTS: the weights have no codes; on CUDA workspaces are up to 64 MiB smaller."),
    "moec_experts_flags": (
        "ExpertsFlags", "MOEC_EXPERTS_",
        "SKIP_ABSENT: rows of y of tokens without a row in the plan are not written."),
    "moec_loss_kind": ("LossKind", "MOEC_LOSS_"),
    "moec_plan_kind": ("PlanKind", "MOEC_PLAN_"),
    "moec_plan_rule": ("PlanRule", "MOEC_PLAN_"),
    "moec_drop": ("Drop", "MOEC_DROP_"),
    "moec_plan_field": (
        "PlanField", "MOEC_PLAN_", "Arrays of a plan; see moec.h for their shapes."),
    "moec_gate_layout": ("GateLayout", "MOEC_GATE_"),
    "moec_orientation": ("Orientation", "MOEC_"),
    "moec_scheme": ("Scheme", "MOEC_SCHEME_", "Formats of codes: moec.h, enum moec_scheme."),
    "moec_quant_flags": ("QuantFlags", "MOEC_QUANT_"),
    "moec_matrix_name": ("MatrixName", "MOEC_MATRIX_"),
    "moec_quantise_kind": (
        "QuantiseKind", "MOEC_QUANTISE_",
        "What quantise() makes: moec.h, enum moec_quantise_kind."),
    "moec_quantise_flags": ("QuantiseFlags", "MOEC_QUANTISE_"),
    "moec_weights_flags": ("WeightsFlags", "MOEC_WEIGHTS_"),
    "moec_activation_kind": (
        "ActivationKind", "MOEC_ACT_", "Formulas: moec.h, enum moec_activation_kind."),
    "moec_weight_position": ("WeightPosition", "MOEC_WEIGHT_"),
    "moec_combine": ("Combine", "MOEC_COMBINE_"),
    "moec_act_rounding": ("ActRounding", "MOEC_ACT_"),
    "moec_shared": ("Shared", "MOEC_SHARED_"),
    "moec_save": ("Save", "MOEC_SAVE_"),
    "moec_comm_flags": ("CommFlags", "MOEC_COMM_"),
    "moec_ep_scheme": (
        "EpScheme", "MOEC_EP_", "How tokens travel between the ranks of expert parallelism."),
    "moec_ep_flags": ("EpFlags", "MOEC_EP_"),
    "moec_ep_overflow": ("EpOverflow", "MOEC_EP_"),
    "moec_ep_call_flags": ("EpCallFlags", "MOEC_EP_"),
}
MEMBERS = {  # which the prefix does not give
    "MOEC_GATE_THEN_UP": "GATE_THEN_UP", "MOEC_UP_THEN_GATE": "UP_THEN_GATE",
}
ELSEWHERE = {"moec_status_code"}  # moec/_errors.py has a class of exceptions for each


def member(constant, prefix):
    if not constant.startswith(prefix) and constant not in MEMBERS:
        sys.exit(f"generate.py: {constant} does not begin with {prefix}, which CLASSES of "
                 "emit_python_enums.py says of its enum")
    return MEMBERS.get(constant, constant.removeprefix(prefix))


def enum_class(enum, constants):
    name, prefix, *doc = CLASSES[enum]
    flags = enum.endswith("_flags")
    return ["", "", f"class {name}({'IntFlag' if flags else 'IntEnum'}):",
            *(line for text in doc for line in (f'    """{text}"""', "")),
            *(["    NONE = 0"] if flags else []),
            *(f"    {member(one, prefix)} = _raw.{one}" for one in constants)]


def enums_module(api, name):
    """The text of moec/_enums.py, in the order of moec.h."""
    constants = {}
    for one in api["constants"]:
        if one["enum"] not in ELSEWHERE:
            constants.setdefault(one["enum"], []).append(one["name"])
    for enum in constants.keys() ^ CLASSES.keys():
        lacking = "moec.h" if enum in CLASSES else "CLASSES of emit_python_enums.py"
        sys.exit(f"generate.py: {lacking} has no {enum}")
    return HEAD.format(name=name) + "\n".join(
        [line for row in constants.items() for line in enum_class(*row)] + [""])
