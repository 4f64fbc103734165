# SPDX-License-Identifier: Apache-2.0
"""The expert parallelism of transformers 5.23 and later with moec's transport and experts:

    DistributedConfig(ep_size=2, fsdp_size=2, ep_implementation="moec")

A token goes once to each rank that has one of its experts. Backward calls come in one order on all
ranks, as they do when all run the same model."""

from __future__ import annotations

import weakref
from dataclasses import replace
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

_comms: weakref.WeakValueDictionary[str, Comm] = weakref.WeakValueDictionary()


class MoecEP(EPImplementation):  # type: ignore[misc, unused-ignore]
    """Experts of a module on the ranks of an EP mesh. Ranks of one batch (tp_size > 1) and tensors
    on a GPU raise NotImplementedError."""

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        if tp_mesh.size() > 1:
            raise NotImplementedError(
                f'moec.transformers: ep_implementation="moec" with tp_size={tp_mesh.size()}; 1 can '
                "be used, so that each rank has a batch of its own"
            )
        self.experts, self.group = experts, ep_mesh.get_group()
        self.total = self.num_local_experts * ep_mesh.size()
        self._texts: dict[Any, str] = {}
        self._comm: Comm | None = None

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        if hidden_states.device.type != "cpu":
            raise NotImplementedError(
                f'moec.transformers: ep_implementation="moec" of tensors on '
                f"{hidden_states.device}; cpu can be used"
            )
        x = hidden_states.to(tensors_of(self.experts)["down"].dtype)
        ep = self._ep(x, top_k_index.shape[-1])
        return parted(ep, x, top_k_index, top_k_weights, lambda *guests: self._run(ep, *guests))

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

    def _ep(self, x: Tensor, top_k: int) -> EP:
        """That of all modules of this shape, which has room for the batch of each rank."""
        most = torch.tensor([x.shape[0]])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        found = self._own_comm()
        key = (x.shape[1], self.total, top_k, x.dtype)
        ep: EP | None = found.eps.get(key)
        if ep is None or ep.desc.max_tokens < int(most):
            room = 1 << (max(int(most), 1) - 1).bit_length()
            desc = EpDesc(hidden=x.shape[1], max_tokens=room, num_experts=self.total, top_k=top_k,
                          dtype=code_of(x.dtype, "x", FLOATS))
            ep = found.eps[key] = EP(found, desc)
        return ep

    def _own_comm(self) -> Any:
        if self._comm is None:
            name = self.group.group_name
            held: Any = _comms.get(name)
            if held is None or held.group is not self.group:
                held = _comms[name] = comm(self.group)
                held.eps = {}
            self._comm = held
        return self._comm


EPImplementationInterface.register("moec", MoecEP)
