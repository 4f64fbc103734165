# SPDX-License-Identifier: Apache-2.0
"""The expert parallelism of transformers 5.23 and later with moec's transport and experts:

    DistributedConfig(ep_size=2, fsdp_size=2, ep_implementation="moec")

A token goes once to each rank that has one of its experts. The host waits once in a forward, for
the largest batch of a rank, which serves all layers of a model. Backward calls come in one order on
all ranks, as they do when all run the same model."""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from .._enums import Save
from .._ep import Comm, EpDesc
from ..torch import _ops
from ..torch._eps import EP
from ..torch._parallel import comm, parted
from ..torch._structs import FLOATS, code_of
from ._experts import spec_of, tensors_of

_comms: weakref.WeakValueDictionary[tuple[str, torch.device], Comm] = weakref.WeakValueDictionary()
_numbers = itertools.count()  # of layers, and of their calls


class _Bounds:
    """What the ranks of a comm agreed on as the largest T, by model. All ranks call the same layers
    in the same order, so that all know without a word when a forward begins: a layer comes again.
    """

    def __init__(self) -> None:
        self._served: dict[int, tuple[Any, int, set[int]]] = {}
        """{id: (model, which keeps the id its own; bound; numbers of the layers that had it)}"""
        self._most = 1
        self._waiting: defaultdict[int, weakref.WeakSet[_Call]] = defaultdict(weakref.WeakSet)

    def of(self, model: Any, layer: int, count: int, agree: Callable[[], int]) -> int:
        """The bound for a call of a layer with so many tokens; agree() asks all ranks."""
        if _is_recomputed():
            return self._again(layer, count)
        _, bound, layers = self._served.get(id(model), (model, 0, {layer}))
        if layer in layers:
            bound, layers = agree(), set()
            self._served[id(model)] = model, bound, layers
        layers.add(layer)
        self._most = max(self._most, bound)
        return bound

    def keep(self, layer: int, count: int, bound: int, y: Tensor) -> None:
        """The bound of a call for its recomputation, as long as the graph of y lives."""
        call = _Call(next(_numbers), count, bound)
        y.register_hook(lambda _, call=call: None)
        self._waiting[layer].add(call)

    def _again(self, layer: int, count: int) -> int:
        """That of the last forward that waits for its backward: checkpoints compare the sizes of
        what was saved. Where the forward built no graph, the largest of all, as on all ranks."""
        waiting = self._waiting[layer]
        fitting = [call for call in waiting if call.count == count]
        if not fitting:
            return self._most
        last = max(fitting, key=lambda call: call.number)
        waiting.discard(last)
        return last.bound


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of a layer: its turn, its tokens, and the bound that it had."""

    number: int
    count: int
    bound: int


def _is_recomputed() -> bool:
    """Whether a backward runs, which calls layers again under gradient checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)


class MoecEP(EPImplementation):  # type: ignore[misc, unused-ignore]
    """Experts of a module on the ranks of an EP mesh. Ranks of one batch (tp_size > 1) raise
    NotImplementedError."""

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        if tp_mesh.size() > 1:
            raise NotImplementedError(
                f'moec.transformers: ep_implementation="moec" with tp_size={tp_mesh.size()}; 1 can '
                "be used, so that each rank has a batch of its own"
            )
        self.experts, self.group = experts, ep_mesh.get_group()
        self.total = self.num_local_experts * ep_mesh.size()
        self._model: Any = getattr(experts, "config", None) or object()  # layers of one share it
        self._number = next(_numbers)
        self._texts: dict[Any, str] = {}
        self._comm: Comm | None = None
        self._device: torch.device | None = None

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        x = hidden_states.to(tensors_of(self.experts)["down"].dtype)
        held = self._own_comm(x.device)
        bound = held.bounds.of(self._model, self._number, len(x),
                               lambda: self._largest(held, len(x)))
        if len(x) > bound:
            raise ValueError(
                f"moec.transformers: a layer got {len(x)} tokens, and the ranks agreed on at most "
                f"{bound} as the forward began; layers of one model get the same tokens"
            )
        ep = self._ep(held, x, top_k_index.shape[-1], bound)
        y = parted(ep, x, top_k_index, top_k_weights, lambda *guests: self._run(ep, *guests), bound)
        if y.requires_grad and not _is_recomputed():
            held.bounds.keep(self._number, len(x), bound, y)
        return y

    def _largest(self, held: Any, count: int) -> int:
        """The largest of all ranks' counts, which the host waits for; at least 1."""
        most = torch.tensor([count], device=held.group_device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return max(int(most), 1)

    def _run(self, ep: EP, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        tensors: dict[str, Any] = tensors_of(self.experts)
        key = (ids.shape[-1], *(t.shape for t in tensors.values()))
        if key not in self._texts:
            spec = spec_of(self.experts, ids.shape[-1])
            own = replace(spec.experts, num_experts=self.total, expert_begin=ep.experts.start,
                          expert_end=ep.experts.stop)
            self._texts[key] = replace(spec, experts=own).text()
        tensors |= {"x": x, "expert_ids": ids, "routing_weights": weights}
        return _ops.call(_ops.EXPERTS, tensors, self._texts[key], Save.PREACT)[0]

    def _ep(self, held: Any, x: Tensor, top_k: int, bound: int) -> EP:
        """That of all modules of this shape, which has room for the batch of each rank."""
        key = (x.shape[1], self.total, top_k, x.dtype)
        ep: EP | None = held.eps.get(key)
        if ep is None or ep.desc.max_tokens < bound:
            room = 1 << (bound - 1).bit_length()
            desc = EpDesc(hidden=x.shape[1], max_tokens=room, num_experts=self.total, top_k=top_k,
                          dtype=code_of(x.dtype, "x", FLOATS))
            ep = held.eps[key] = EP(held, desc)
        return ep

    def _own_comm(self, device: torch.device) -> Any:
        if self._comm is None or self._device != device:
            key = (self.group.group_name, device)
            held: Any = _comms.get(key)
            if held is None or held.group is not self.group:
                held = _comms[key] = comm(self.group, device)
                held.eps, held.bounds = {}, _Bounds()
            self._comm, self._device = held, device
        return self._comm


EPImplementationInterface.register("moec", MoecEP)
