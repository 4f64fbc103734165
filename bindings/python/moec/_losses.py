# SPDX-License-Identifier: Apache-2.0
"""Auxiliary losses on router logits, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _raw
from ._context import Context, context_of
from ._enums import DType, LossKind, Score
from ._tensors import Array, empty, require, set_tensors, stream_handle, tensor_array, zeros


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """One loss: loss(context, logits) is its value, loss.backward(context, logits) its gradient.

    kind         LossKind; formulas in moec.h, enum moec_loss_kind
    top_k        K of the balance losses
    coefficient  0 = 1
    seq_len      BALANCE_SEQUENCE: tokens per sequence
    score        SWITCH, SEQUENCE: the router's score
    """

    kind: LossKind
    top_k: int = 0
    coefficient: float = 0.0
    seq_len: int = 0
    score: Score = Score.SOFTMAX

    def __call__(
        self,
        context: Context,
        logits: Array | Sequence[Array],
        *,
        counts: Array | None = None,
        token_mask: Array | None = None,
        stream: Any = None,
    ) -> Array:
        """Loss [1] f32 of logits [T,E] (a list, one per layer, for BALANCE_MIXTRAL).

        counts [E] i32 or i64 replaces counting (SWITCH); token_mask [T] u8 or bool leaves tokens
        out.
        """
        keep: list[Any] = []
        layers = self._layers(logits)
        handle = stream_handle(stream)
        loss = empty((1,), DType.F32, layers[0])
        args = self._args(layers, keep, counts, token_mask, handle)
        set_tensors(args, keep, write=True, stream=handle, loss=loss)
        _raw.moec_loss_forward(context_of(context), args, handle)
        return loss

    def backward(
        self,
        context: Context,
        logits: Array | Sequence[Array],
        *,
        d_loss: Array | None = None,
        counts: Array | None = None,
        token_mask: Array | None = None,
        out: Sequence[Array] | None = None,
        stream: Any = None,
    ) -> list[Array]:
        """d_logits [T,E] f32 per layer; added to `out` when given. d_loss [1] f32 (absent: 1)."""
        keep: list[Any] = []
        layers = self._layers(logits)
        d_logits = [zeros(z.shape, DType.F32, z) for z in layers] if out is None else list(out)
        if len(d_logits) != len(layers):  # the library reads one count for both
            raise ValueError(
                f"moec.Loss.backward: out has {len(d_logits)} arrays, logits {len(layers)}; "
                "one for each layer is needed in both"
            )
        handle = stream_handle(stream)
        args = self._args(layers, keep, counts, token_mask, handle)
        args.d_logits = tensor_array(d_logits, keep, "out", write=True, stream=handle)
        set_tensors(args, keep, stream=handle, d_loss=d_loss)
        _raw.moec_loss_backward(context_of(context), args, handle)
        return d_logits

    @staticmethod
    def _layers(logits: Array | Sequence[Array]) -> list[Array]:
        layers = list(logits) if isinstance(logits, (list, tuple)) else [logits]
        for array in layers:
            require(logits=array)
        return layers

    def _args(
        self,
        layers: list[Array],
        keep: list[Any],
        counts: Array | None,
        token_mask: Array | None,
        stream: int,
    ) -> Any:
        args = _raw.moec_loss_args()
        for name in ("kind", "top_k", "coefficient", "seq_len", "score"):
            setattr(args, name, getattr(self, name))
        args.logits = tensor_array(layers, keep, "logits", stream=stream)
        args.count = len(layers)
        set_tensors(args, keep, stream=stream, counts=counts, token_mask=token_mask)
        return args
