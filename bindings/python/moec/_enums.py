# SPDX-License-Identifier: Apache-2.0
# Generated from moec.h by generate.py; do not edit.
"""The constants of moec.h, one enum each; values come from the header, so they cannot drift."""

from __future__ import annotations

from enum import IntEnum, IntFlag

from . import _raw


class DType(IntEnum):
    """Element types, with DLPack's values."""

    F32 = _raw.MOEC_F32
    F16 = _raw.MOEC_F16
    BF16 = _raw.MOEC_BF16
    F64 = _raw.MOEC_F64
    I8 = _raw.MOEC_I8
    U8 = _raw.MOEC_U8
    I32 = _raw.MOEC_I32
    I64 = _raw.MOEC_I64
    BOOL = _raw.MOEC_BOOL
    F8_E4M3 = _raw.MOEC_F8_E4M3
    F8_E5M2 = _raw.MOEC_F8_E5M2
    F8_E8M0 = _raw.MOEC_F8_E8M0


class DeviceType(IntEnum):
    """Kinds of memory, with DLPack's values."""

    CPU = _raw.MOEC_CPU
    CUDA = _raw.MOEC_CUDA
    CUDA_HOST = _raw.MOEC_CUDA_HOST
    CUDA_MANAGED = _raw.MOEC_CUDA_MANAGED


class LogLevel(IntEnum):
    TRACE = _raw.MOEC_LOG_TRACE
    DEBUG = _raw.MOEC_LOG_DEBUG
    INFO = _raw.MOEC_LOG_INFO
    WARN = _raw.MOEC_LOG_WARN
    ERROR = _raw.MOEC_LOG_ERROR
    OFF = _raw.MOEC_LOG_OFF


class ContextFlags(IntFlag):
    NONE = 0
    NO_ALLOC = _raw.MOEC_CONTEXT_NO_ALLOC
    CHECK_INPUTS = _raw.MOEC_CONTEXT_CHECK_INPUTS
    PROFILE = _raw.MOEC_CONTEXT_PROFILE


class MathMode(IntEnum):
    DEFAULT = _raw.MOEC_MATH_DEFAULT
    TF32 = _raw.MOEC_MATH_TF32


class RouterInput(IntEnum):
    PLAIN = _raw.MOEC_INPUT_PLAIN
    RMS_SCALED = _raw.MOEC_INPUT_RMS_SCALED


class Precision(IntEnum):
    FP32 = _raw.MOEC_PREC_FP32
    DATA = _raw.MOEC_PREC_DATA


class Score(IntEnum):
    SOFTMAX = _raw.MOEC_SCORE_SOFTMAX
    SIGMOID = _raw.MOEC_SCORE_SIGMOID
    SQRT_SOFTPLUS = _raw.MOEC_SCORE_SQRT_SOFTPLUS
    IDENTITY = _raw.MOEC_SCORE_IDENTITY


class Select(IntEnum):
    TOPK = _raw.MOEC_SELECT_TOPK
    GROUP_TOPK = _raw.MOEC_SELECT_GROUP_TOPK
    TABLE = _raw.MOEC_SELECT_TABLE
    SPARSE_MIXER = _raw.MOEC_SELECT_SPARSE_MIXER
    GIVEN = _raw.MOEC_SELECT_GIVEN
    ROUND_ROBIN = _raw.MOEC_SELECT_ROUND_ROBIN


class GroupFill(IntEnum):
    NEG_INF = _raw.MOEC_FILL_NEG_INF
    ZERO = _raw.MOEC_FILL_ZERO


class WeightRule(IntEnum):
    SCORE = _raw.MOEC_WEIGHT_SCORE
    SOFTMAX_SELECTED = _raw.MOEC_WEIGHT_SOFTMAX_SELECTED
    SIGMOID_SELECTED = _raw.MOEC_WEIGHT_SIGMOID_SELECTED


class Norm(IntEnum):
    NONE = _raw.MOEC_NORM_NONE
    SUM = _raw.MOEC_NORM_SUM
    CLAMP_SUM = _raw.MOEC_NORM_CLAMP_SUM
    P = _raw.MOEC_NORM_P


class SlotOrder(IntEnum):
    BY_VALUE = _raw.MOEC_SLOT_BY_VALUE
    BY_EXPERT = _raw.MOEC_SLOT_BY_EXPERT


class RouterFlags(IntFlag):
    NONE = 0
    LOGIT_BIAS = _raw.MOEC_ROUTER_LOGIT_BIAS
    SELECT_BIAS = _raw.MOEC_ROUTER_SELECT_BIAS
    PER_EXPERT_SCALE = _raw.MOEC_ROUTER_PER_EXPERT_SCALE
    NORM_IF_K_GT_1 = _raw.MOEC_ROUTER_NORM_IF_K_GT_1
    JITTER_X = _raw.MOEC_ROUTER_JITTER_X


class GradFlags(IntFlag):
    """SKIP_IDLE: Router.gate_backward leaves out tokens whose row of d_logits is 0."""

    NONE = 0
    ACCUMULATE = _raw.MOEC_GRAD_ACCUMULATE
    ACCUMULATE_X = _raw.MOEC_GRAD_ACCUMULATE_X
    SKIP_IDLE = _raw.MOEC_GRAD_SKIP_IDLE


class LossKind(IntEnum):
    BALANCE_MIXTRAL = _raw.MOEC_LOSS_BALANCE_MIXTRAL
    BALANCE_SWITCH = _raw.MOEC_LOSS_BALANCE_SWITCH
    BALANCE_SEQUENCE = _raw.MOEC_LOSS_BALANCE_SEQUENCE
    Z = _raw.MOEC_LOSS_Z


class PlanKind(IntEnum):
    TOPK = _raw.MOEC_PLAN_TOPK
    EXPERT_CHOICE = _raw.MOEC_PLAN_EXPERT_CHOICE


class Drop(IntEnum):
    NONE = _raw.MOEC_DROP_NONE
    BY_POSITION = _raw.MOEC_DROP_BY_POSITION
    BY_WEIGHT = _raw.MOEC_DROP_BY_WEIGHT


class PlanField(IntEnum):
    """Arrays of a plan; see moec.h for their shapes."""

    COUNTS = _raw.MOEC_PLAN_COUNTS
    GROUP_OFFSETS = _raw.MOEC_PLAN_GROUP_OFFSETS
    ROW_TOKEN = _raw.MOEC_PLAN_ROW_TOKEN
    ROW_SLOT = _raw.MOEC_PLAN_ROW_SLOT
    ROW_WEIGHT = _raw.MOEC_PLAN_ROW_WEIGHT
    ASSIGNMENT_ROW = _raw.MOEC_PLAN_ASSIGNMENT_ROW
    EXPERT_IDS = _raw.MOEC_PLAN_EXPERT_IDS
    ROUTING_WEIGHTS = _raw.MOEC_PLAN_ROUTING_WEIGHTS
    TOTALS = _raw.MOEC_PLAN_TOTALS
    TOKEN_OFFSETS = _raw.MOEC_PLAN_TOKEN_OFFSETS
    TOKEN_ROWS = _raw.MOEC_PLAN_TOKEN_ROWS
    ROW_ID_MAP = _raw.MOEC_PLAN_ROW_ID_MAP
    INDEX_MAP = _raw.MOEC_PLAN_INDEX_MAP


class PlanRule(IntEnum):
    ROUND_ROBIN = _raw.MOEC_PLAN_ROUND_ROBIN
    EQUAL_COUNTS = _raw.MOEC_PLAN_EQUAL_COUNTS


class GateLayout(IntEnum):
    SPLIT = _raw.MOEC_GATE_SPLIT
    GATE_THEN_UP = _raw.MOEC_GATE_THEN_UP
    UP_THEN_GATE = _raw.MOEC_UP_THEN_GATE
    INTERLEAVED = _raw.MOEC_GATE_INTERLEAVED
    NONE = _raw.MOEC_GATE_NONE


class Orientation(IntEnum):
    OUT_IN = _raw.MOEC_OUT_IN
    IN_OUT = _raw.MOEC_IN_OUT


class Scheme(IntEnum):
    """Formats of codes: moec.h, enum moec_scheme."""

    NONE = _raw.MOEC_SCHEME_NONE
    INT8 = _raw.MOEC_SCHEME_INT8
    FP8 = _raw.MOEC_SCHEME_FP8
    CODEBOOK4 = _raw.MOEC_SCHEME_CODEBOOK4
    MXFP4 = _raw.MOEC_SCHEME_MXFP4
    NVFP4 = _raw.MOEC_SCHEME_NVFP4
    INT4 = _raw.MOEC_SCHEME_INT4
    AWQ = _raw.MOEC_SCHEME_AWQ
    GPTQ = _raw.MOEC_SCHEME_GPTQ
    GPTQ_V2 = _raw.MOEC_SCHEME_GPTQ_V2
    GGUF_Q8_0 = _raw.MOEC_SCHEME_GGUF_Q8_0
    GGUF_Q4_0 = _raw.MOEC_SCHEME_GGUF_Q4_0
    GGUF_Q4_K = _raw.MOEC_SCHEME_GGUF_Q4_K
    GGUF_Q6_K = _raw.MOEC_SCHEME_GGUF_Q6_K
    GGUF_MXFP4 = _raw.MOEC_SCHEME_GGUF_MXFP4


class QuantFlags(IntFlag):
    NONE = 0
    SCALES2_DIVIDES = _raw.MOEC_QUANT_SCALES2_DIVIDES


class WeightsFlags(IntFlag):
    NONE = 0
    FROZEN = _raw.MOEC_WEIGHTS_FROZEN


class MatrixName(IntEnum):
    GATE_UP = _raw.MOEC_MATRIX_GATE_UP
    GATE = _raw.MOEC_MATRIX_GATE
    UP = _raw.MOEC_MATRIX_UP
    DOWN = _raw.MOEC_MATRIX_DOWN


class QuantiseKind(IntEnum):
    """What quantise() makes: moec.h, enum moec_quantise_kind."""

    INT8 = _raw.MOEC_QUANTISE_INT8
    INT4 = _raw.MOEC_QUANTISE_INT4
    FP8 = _raw.MOEC_QUANTISE_FP8
    MXFP8 = _raw.MOEC_QUANTISE_MXFP8
    MXFP4 = _raw.MOEC_QUANTISE_MXFP4
    NVFP4 = _raw.MOEC_QUANTISE_NVFP4
    NF4 = _raw.MOEC_QUANTISE_NF4
    FP4 = _raw.MOEC_QUANTISE_FP4


class QuantiseFlags(IntFlag):
    NONE = 0
    ASYMMETRIC = _raw.MOEC_QUANTISE_ASYMMETRIC
    NESTED = _raw.MOEC_QUANTISE_NESTED
    SCALES2_DIVIDES = _raw.MOEC_QUANTISE_SCALES2_DIVIDES


class ActivationKind(IntEnum):
    """Formulas: moec.h, enum moec_activation_kind."""

    SWIGLU = _raw.MOEC_ACT_SWIGLU
    GPTOSS = _raw.MOEC_ACT_GPTOSS
    CLAMP_SWIGLU = _raw.MOEC_ACT_CLAMP_SWIGLU
    SWIGLU_CLAMP = _raw.MOEC_ACT_SWIGLU_CLAMP
    GEGLU_TANH = _raw.MOEC_ACT_GEGLU_TANH
    GEGLU_ERF = _raw.MOEC_ACT_GEGLU_ERF
    QUICK_GEGLU = _raw.MOEC_ACT_QUICK_GEGLU
    SITU = _raw.MOEC_ACT_SITU
    RELU2 = _raw.MOEC_ACT_RELU2
    SILU = _raw.MOEC_ACT_SILU
    IDENTITY = _raw.MOEC_ACT_IDENTITY


class WeightPosition(IntEnum):
    ON_OUTPUT = _raw.MOEC_WEIGHT_ON_OUTPUT
    ON_ACTIVATION = _raw.MOEC_WEIGHT_ON_ACTIVATION
    ON_INPUT = _raw.MOEC_WEIGHT_ON_INPUT


class Combine(IntEnum):
    FP32_SLOT = _raw.MOEC_COMBINE_FP32_SLOT
    FP32_EXPERT = _raw.MOEC_COMBINE_FP32_EXPERT
    DATA_EXPERT = _raw.MOEC_COMBINE_DATA_EXPERT


class ActRounding(IntEnum):
    FP32_ONCE = _raw.MOEC_ACT_FP32_ONCE
    PER_OP = _raw.MOEC_ACT_PER_OP


class Shared(IntEnum):
    NONE = _raw.MOEC_SHARED_NONE
    ADD = _raw.MOEC_SHARED_ADD
    SIGMOID_GATE = _raw.MOEC_SHARED_SIGMOID_GATE
    SOFTMAX2 = _raw.MOEC_SHARED_SOFTMAX2


class Save(IntEnum):
    NONE = _raw.MOEC_SAVE_NONE
    INPUT = _raw.MOEC_SAVE_INPUT
    PREACT = _raw.MOEC_SAVE_PREACT
    ALL = _raw.MOEC_SAVE_ALL


class ExpertsDescFlags(IntFlag):
    """PLAIN_WEIGHTS: the weights have no codes; on CUDA workspaces are up to 64 MiB smaller."""

    NONE = 0
    PLAIN_WEIGHTS = _raw.MOEC_EXPERTS_PLAIN_WEIGHTS


class ExpertsFlags(IntFlag):
    """SKIP_ABSENT: rows of y of tokens without a row in the plan are not written."""

    NONE = 0
    SKIP_ABSENT = _raw.MOEC_EXPERTS_SKIP_ABSENT


class CommFlags(IntFlag):
    NONE = 0
    DEVICE = _raw.MOEC_COMM_DEVICE
    CAPTURE = _raw.MOEC_COMM_CAPTURE


class EpScheme(IntEnum):
    """How tokens travel between the ranks of expert parallelism."""

    AUTO = _raw.MOEC_EP_AUTO
    GATHER = _raw.MOEC_EP_GATHER
    PEER = _raw.MOEC_EP_PEER
    ROWS = _raw.MOEC_EP_ROWS
    EXACT = _raw.MOEC_EP_EXACT


class EpFlags(IntFlag):
    NONE = 0
    FORWARD_ONLY = _raw.MOEC_EP_FORWARD_ONLY


class EpOverflow(IntEnum):
    REPORT = _raw.MOEC_EP_REPORT
    DROP_BY_WEIGHT = _raw.MOEC_EP_DROP_BY_WEIGHT


class EpCallFlags(IntFlag):
    NONE = 0
    ADD = _raw.MOEC_EP_ADD
