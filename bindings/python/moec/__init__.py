# SPDX-License-Identifier: Apache-2.0
"""moec: Mixture-of-Experts layers, forward and backward, on NumPy arrays and DLPack objects.

T tokens, H hidden, I intermediate, E experts, Z identity experts, K experts per token. Layer is
the whole layer; Router, Plan, Experts and the functions permute to unpermute_backward are its
parts. Arrays are never copied; every error is a MoecError with the library's own message.
"""

from ._adapters import Adapter, Adapters, Factors
from ._context import (
    Context,
    DeviceInfo,
    Stats,
    abi_version,
    build_info,
    check_library as _check_library,
    describe_backend,
    devices,
    load_backend,
    set_log,
    version,
)
from ._descriptors import Activation, AdaptersDesc, ExpertsDesc, PlanDesc, RouterDesc, WeightsDesc
from ._enums import (
    ActivationKind,
    ActRounding,
    Combine,
    ContextFlags,
    DeviceType,
    Drop,
    DType,
    EpCallFlags,
    EpFlags,
    EpOverflow,
    EpScheme,
    ExpertsDescFlags,
    ExpertsFlags,
    GateLayout,
    GradFlags,
    GroupFill,
    LogLevel,
    LossKind,
    MathMode,
    MatrixName,
    Norm,
    Orientation,
    PlanField,
    PlanKind,
    PlanRule,
    Precision,
    QuantFlags,
    QuantiseKind,
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
from ._ep import EP, Comm, EpDesc, EpState, Guests
from ._errors import (
    AliasError,
    CorruptError,
    DeviceError,
    DTypeError,
    IndexOverflowError,
    InvalidArgumentError,
    LayoutError,
    MismatchError,
    MoecError,
    OutOfMemoryError,
    ShapeError,
    StateError,
    UnsupportedError,
)
from ._experts import Experts, ExpertsResult, Size, Sizes
from ._fields import ExpertsGradients, LayerGradients
from ._layer import Layer, LayerResult
from ._losses import Loss
from ._plan import (
    Plan,
    Totals,
    permute,
    permute_backward,
    plan_size,
    unpermute,
    unpermute_backward,
)
from ._quantise import Quantised, quantise
from ._router import Router, Routing
from ._tensors import DeviceArray, dtype_of, numpy_dtype
from ._weights import Quant, Weights, WeightSet, WeightsInfo
from .matrices import Matrices, read_experts

_check_library()
__version__ = version()
__all__ = [
    "abi_version", "Activation", "ActivationKind", "ActRounding", "Adapter", "Adapters",
    "AdaptersDesc", "AliasError", "build_info", "Combine", "Comm", "Context", "ContextFlags",
    "CorruptError", "describe_backend", "DeviceArray", "DeviceError", "DeviceInfo", "devices",
    "DeviceType", "Drop", "DType", "DTypeError", "dtype_of", "EP", "EpCallFlags", "EpDesc",
    "EpFlags", "EpOverflow", "EpScheme", "EpState", "Experts", "ExpertsDesc",
    "ExpertsDescFlags", "ExpertsFlags", "ExpertsGradients", "ExpertsResult", "Factors",
    "GateLayout", "GradFlags", "GroupFill", "Guests", "IndexOverflowError", "InvalidArgumentError",
    "Layer", "LayerGradients", "LayerResult", "LayoutError", "load_backend", "LogLevel", "Loss",
    "LossKind", "MathMode", "Matrices", "MatrixName", "MismatchError", "MoecError", "Norm",
    "numpy_dtype", "Orientation", "OutOfMemoryError", "permute", "permute_backward", "Plan",
    "PlanDesc", "PlanField", "PlanKind", "PlanRule", "plan_size", "Precision", "Quant",
    "QuantFlags", "quantise", "Quantised", "QuantiseKind", "read_experts", "Router", "RouterDesc",
    "RouterFlags", "RouterInput", "Routing", "Save", "Scheme", "Score", "Select", "set_log",
    "ShapeError", "Shared", "Size", "Sizes", "SlotOrder", "StateError", "Stats", "Totals",
    "unpermute", "unpermute_backward", "UnsupportedError", "version", "WeightPosition",
    "WeightRule", "Weights", "WeightsDesc", "WeightSet", "WeightsFlags", "WeightsInfo",
]
