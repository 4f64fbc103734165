# SPDX-License-Identifier: Apache-2.0
"""What of a model's experts is packed, what is not and why; and the check that a load left none of
a checkpoint's experts out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..torch._packed import PackedTensor
from ._packed import STACKS, stored


@dataclass(frozen=True)
class Row:
    """One stack of experts."""

    name: str
    kind: str
    """how its codes are stored; "" where it is plain"""
    bytes: int
    plain_bytes: int
    """of the same values in its type"""
    why: str
    """why it is plain; "" where it is packed"""

    @property
    def is_packed(self) -> bool:
        return bool(self.kind)


class Report(list[Row]):
    """The stacks in the model's order; as text a line each, and the sums."""

    def __str__(self) -> str:
        lines = [f"{row.name}: {row.kind or 'plain'}, {row.bytes:,} bytes"
                 + (f" of {row.plain_bytes:,}" if row.is_packed else f" ({row.why})")
                 for row in self]
        packed = [row for row in self if row.is_packed]
        lines.append(
            f"{len(packed)} of {len(self)} stacks packed: {sum(r.bytes for r in self):,} bytes, "
            f"{sum(r.plain_bytes for r in self):,} as plain values"
        )
        return "\n".join(lines)


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that look like experts of transformers, by path."""
    return {path: module for path, module in model.named_modules()
            if hasattr(module, "_apply_gate") or type(module).__name__.endswith("Experts")}


def report(model: nn.Module) -> Report:
    """A row for each stack of a model's experts: packed or plain, its bytes, why it is plain."""
    found = Report()
    for path, module in experts_of(model).items():
        for name in STACKS:
            value = stored(module, name)
            if not isinstance(value, Tensor) or value.dim() != 3:
                continue
            full = f"{path}.{name}"
            plain = value.numel() * value.element_size()
            if isinstance(value, PackedTensor):
                found.append(Row(full, value.store.kind, value.packed_bytes, plain, ""))
            else:
                found.append(Row(full, "", plain, plain, _why(model, module, full)))
    return found


def _why(model: Any, module: nn.Module, path: str) -> str:
    from ._load import why_dense

    quantiser = getattr(model, "hf_quantizer", None)
    if quantiser is None:
        return "the model was loaded without a quantization_config that is in use"
    if not hasattr(module, "_apply_gate"):
        return f"transformers does not dispatch {type(module).__name__}"
    return why_dense(module, path, quantiser) or (
        "it was plain in the checkpoint, or moec.transformers was not imported before the load")


def refuse_left_out(model: nn.Module, keys: set[str]) -> None:
    """Raise where a quantised checkpoint's experts did not go into the model, which would leave
    them random."""
    paths = [f"{path}." for path in experts_of(model)]
    found = sorted(key for key in keys if any(path in f"{key}." for path in paths))
    if found:
        shown = ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
        raise RuntimeError(
            f"moec.transformers: {shown}: experts of the quantised checkpoint and the model's do "
            "not fit each other; they would be left random"
        )
