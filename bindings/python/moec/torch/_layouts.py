# SPDX-License-Identifier: Apache-2.0
"""How the matrices of experts [E,N,K] lie in memory, and which of them the library reads there:
those whose experts are compact, each as [N,K] or turned, as [K,N]. Experts may lie anywhere."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from .._spec import ROUTED_WEIGHTS, SHARED_WEIGHTS
from .._weights import MATRICES, WEIGHTS

# What shares an orientation: fields of WeightSet, and inputs of an operator.
_FIELDS = (MATRICES[:-1], MATRICES[-1:])
_GROUPS = tuple(
    tuple(names[WEIGHTS.index(field)] for field in fields)
    for names in (ROUTED_WEIGHTS, SHARED_WEIGHTS) for fields in _FIELDS
)
_NAMES = frozenset(name for group in _GROUPS for name in group)
_copied: set[tuple[object, ...]] = set()


def is_turned(matrices: Tensor) -> bool | None:
    """Whether each expert's matrix lies turned; None: its values are not compact."""
    if matrices.dim() != 3:
        return False if matrices.is_contiguous() else None
    (n, k), (n_stride, k_stride) = matrices.shape[1:], matrices.stride()[1:]
    if (k == 1 or k_stride == 1) and (n == 1 or n_stride == k):
        return False
    return True if (n == 1 or n_stride == 1) and (k == 1 or k_stride == n) else None


def turned_sets(given: Mapping[str, Tensor | None]) -> tuple[bool, bool]:
    """Whether the experts of gate and up, and of down, lie turned; given by WeightSet's names.
    Raises ValueError, naming it, for a matrix or bias that cannot be read where it lies."""
    held = {field: tensor for field, tensor in given.items() if tensor is not None}
    wrong = [field for field in held if field.endswith("_bias") and not held[field].is_contiguous()]
    found = []
    for fields in _FIELDS:
        turned = {field: is_turned(held[field]) for field in fields if field in held}
        found.append(bool(turned) and all(turned.values()))
        wrong += [field for field, is_so in turned.items() if is_so is not found[-1]]
    for field in wrong:
        tensor = held[field]
        raise ValueError(
            f"moec.torch: {field} {list(tensor.shape)} has the strides {list(tensor.stride())}; "
            "parameters whose experts are contiguous or transposed can be frozen"
        )
    return found[0], found[1]


def stored(matrices: Tensor) -> Tensor:
    """The view in which each expert's matrix is contiguous."""
    return matrices.transpose(1, 2) if is_turned(matrices) else matrices


def empty_as(of: Tensor, dtype: torch.dtype, turned: bool) -> Tensor:
    """Memory for a gradient, turned as the parameter is."""
    if not turned:
        return torch.empty_like(of, dtype=dtype, memory_format=torch.contiguous_format)
    return of.new_empty(of.transpose(1, 2).shape, dtype=dtype).transpose(1, 2)


def in_place(given: Mapping[str, Tensor], as_rows: bool = False) -> dict[str, bool]:
    """The matrices, of those that are not contiguous, that are read where they lie, and whether
    they are turned. as_rows: none may be turned."""
    if all(map(Tensor.is_contiguous, given.values())):
        return {}
    found: dict[str, bool] = {}
    for group in _GROUPS:
        turned = {name: _turned_memory(given[name]) for name in group if name in given}
        # One orientation serves a group: a matrix that lies otherwise is copied.
        wanted = not as_rows and bool(turned) and all(turned.values())
        found |= {name: wanted for name, is_so in turned.items() if is_so is wanted}
    return found


def _turned_memory(matrices: Tensor) -> bool | None:
    """is_turned() of values that are in memory, not only noted by torch."""
    noted = matrices._is_zerotensor() or matrices.is_neg()
    return None if noted else is_turned(matrices)


def are_compact(tensors: Collection[Tensor]) -> bool:
    """Whether compact() leaves all of them as they are."""
    return (all(map(Tensor.is_contiguous, tensors)) and not any(map(Tensor.is_neg, tensors))
            and not any(map(Tensor._is_zerotensor, tensors)))


def compact(value: Tensor) -> Tensor:
    """Contiguous, with what torch only noted (all zeros, a negation) done in memory."""
    if value._is_zerotensor():
        value = value.clone()
    if value.is_neg():
        value = value.resolve_neg()
    return value if value.is_contiguous() else value.contiguous()


def compact_matrix(name: str, value: Tensor) -> Tensor:
    """The same of a matrix, with a warning where it is copied: once for one like this."""
    if name in _NAMES and not value.is_contiguous():
        shape, strides = list(value.shape), list(value.stride())
        key = (name, *shape, *strides)
        if key not in _copied:
            _copied.add(key)
            warnings.warn(
                f"moec.torch: {name} {shape} has the strides {strides}, so every call copies it; "
                "experts that are contiguous or transposed are read where they lie",
                stacklevel=2,
            )
    return compact(value)
