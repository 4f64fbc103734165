# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism over a process group of torch.distributed: dispatch and combine that autograd
goes through, and what a training loop needs beside them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._descriptors import ExpertsDesc
from .._ep import Comm
from .._spec import ROUTED_WEIGHTS
from .._tensors import dtype_of, kind_of
from ._engine import context_of, current_stream
from ._eps import EP, Route, view_of
from ._structs import FLOATS, code_of


def comm(group: Any = None, device: torch.device | str | None = None) -> Comm:
    """A communicator of a process group, None: of all ranks. device: whose tensors it is for; None:
    the current GPU where the group's backend is nccl, else the CPU. NCCL's communicator is
    borrowed: calls are queued on torch's stream, and may be captured. Other backends, such as gloo,
    move host memory; for a GPU's tensors calls then wait."""
    group = dist.group.WORLD if group is None else group
    if device is None:
        device = "cuda" if str(dist.get_backend(group)) == "nccl" else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if address := _nccl_comm(group, device):
        made = Comm.from_nccl(context_of(device), address, rank, size,
                              abort=lambda: group._get_backend(device).abort())
        made.group, made.group_device = group, device
        return made

    def of(array: Any) -> Tensor:
        return torch.from_numpy(array).reshape(-1)

    def all_gather(send: Any, recv: Any) -> None:
        dist.all_gather_into_tensor(of(recv), of(send), group=group)

    def all_to_all(send: Any, recv: Any) -> None:
        dist.all_to_all_single(of(recv), of(send), group=group)

    def all_to_all_v(send: Any, send_sizes: list[int], recv: Any, recv_sizes: list[int]) -> None:
        dist.all_to_all_single(of(recv), of(send), recv_sizes, send_sizes, group=group)

    made = Comm(context_of(device), rank, size, all_gather, all_to_all, all_to_all_v)
    made.group, made.group_device = group, torch.device("cpu")
    return made


def _nccl_comm(group: Any, device: torch.device) -> int:
    """The ncclComm_t that a group has for tensors of a device; 0 where another backend moves
    them."""
    if device.type != "cuda" or "nccl" not in str(dist.get_backend_config(group)):
        return 0
    backend = group._get_backend(device)
    if not hasattr(backend, "_comm_ptr"):
        return 0
    if not backend._comm_ptr():  # it is made by the first collective
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return int(backend._comm_ptr())


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ep: EP, route: Route, x: Tensor, weights: Tensor) -> Any:
        ctx.ep, ctx.route, ctx.like = ep, route, x.new_empty(()).expand(x.shape)
        views = ep.send(route, x)
        found = [view_of(v).clone() for v in (views.guests, views.guest_ids, views.guest_weights)]
        found[0][(found[1] < 0).all(-1)] = 0  # they may hold anything
        ctx.mark_non_differentiable(found[1])
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, d_guests: Tensor, _: Any, d_weights: Tensor) -> Any:
        ep, route = ctx.ep, ctx.route
        d_x = torch.empty_like(ctx.like, memory_format=torch.contiguous_format)
        if ep.route is not route:  # another layer's backward came between
            ep.send(route, d_x.zero_())
        ep.partial.copy_(d_guests)
        d_routing = torch.empty_like(route.weights)
        ep.combine(d_x, d_guest_weights=d_weights.float().contiguous(),
                   d_routing_weights=d_routing, stream=current_stream(d_x))
        if ep.scale != 1.0:
            d_x, d_routing = d_x / ep.scale, d_routing / ep.scale
        return None, None, d_x, d_routing


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ep: EP, route: Route, rows: Tensor) -> Tensor:
        ctx.ep, ctx.route = ep, route
        ep.partial.copy_(rows)
        y = rows.new_empty((len(route.ids), rows.shape[-1]))
        ep.combine(y, stream=current_stream(y))
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> Any:
        ep, route = ctx.ep, ctx.route
        d_y = d_y if ep.scale == 1.0 else d_y * ep.scale
        views = ep.send(route, d_y.contiguous())
        d_rows = view_of(views.guests).clone()
        d_rows[(view_of(views.guest_ids) < 0).all(-1)] = 0
        return None, None, d_rows


@torch.compiler.disable
def parted(ep: EP, x: Tensor, expert_ids: Tensor, routing_weights: Tensor,
           run: Callable[[Tensor, Tensor, Tensor], Tensor], bound: int = 0) -> Tensor:
    """y [T,H]: run(x, ids, weights) is called for the guests of this rank, whose ids are -1 where
    the expert is of another. Backward calls of one ep come in one order on all ranks. bound: T of
    no rank is larger; 0: the ep's max_tokens."""
    if code_of(x.dtype, "x", FLOATS) != dtype_of(ep.desc.dtype):
        raise TypeError(f"moec.torch: x is of {x.dtype}; the ep was made for {ep.desc.dtype!r}")
    ids = expert_ids.contiguous()
    weights = routing_weights.float().contiguous()
    route = Route(ids, weights.detach(), bound)
    guests, guest_ids, guest_weights = _Dispatch.apply(ep, route, x.contiguous(), weights)
    return _Combine.apply(ep, route, run(guests, guest_ids, guest_weights))


def of_rank(desc: ExpertsDesc, ep: EP | None, codes: Any, rest: bool = False) -> ExpertsDesc:
    """A description of the experts of this rank. Raises for what cannot be parted; rest: the module
    is no layer, and has more than routed experts."""
    if ep is None:
        return desc
    if not isinstance(ep, EP):
        raise TypeError(f"moec.torch: ep is {kind_of(ep)}; a moec.torch.EP is needed")
    if codes is not None:
        raise NotImplementedError("moec.torch: codes are given with an ep; plain matrices can be "
                                  "parted in modules, quantised ones through moec.Layer")
    if rest:
        raise NotImplementedError("moec.torch: Experts with an ep are routed experts alone; "
                                  "MoELayer takes a shared expert, identity experts and a bias")
    return replace(desc, expert_begin=ep.experts.start, expert_end=ep.experts.stop)


# ---- what only some ranks hold
def _parted_modules(model: nn.Module) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if getattr(m, "ep", None) is not None}


def _parted_names(model: nn.Module) -> dict[str, EP]:
    """Names of parameters that hold the experts of one rank."""
    return {f"{at}.{name}" if at else name: module.ep
            for at, module in _parted_modules(model).items()
            for name in ROUTED_WEIGHTS if module._parameters.get(name) is not None}


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """state_dict() with all experts of all ranks, as one process has it. Collective over the
    groups of the eps."""
    state: dict[str, Any] = dict(model.state_dict())
    for name, ep in _parted_names(model).items():
        own = state[name].detach().to(ep.comm.group_device)
        counts = [end - first for first, end in itertools.pairwise(ep.describe()["expert_begin"])]
        sent = own.new_zeros((max(counts), *own.shape[1:]))  # gloo gathers equal parts alone
        sent[:len(own)] = own
        parts = [torch.empty_like(sent) for _ in counts]
        dist.all_gather(parts, sent, group=ep.comm.group)
        state[name] = torch.cat([p[:n] for p, n in zip(parts, counts, strict=True)]).cpu()
    return state


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what full_state_dict() gave, or one process's state_dict(): each rank takes its experts,
    whatever the number of ranks that saved it."""
    own = dict(state)
    for name, ep in _parted_names(model).items():
        own[name] = state[name][ep.experts.start : ep.experts.stop]
    model.load_state_dict(own)


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """torch's clip_grad_norm_ for a model with eps: each expert counts once, on the rank that has
    it, and what all ranks hold counts once. Gradients of the latter have been made equal before, as
    DDP does. Returns the norm; collective over the group of the eps, which is one."""
    eps = _parted_names(model)
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    device = next((g.device for g in grads.values()), torch.device("cpu"))
    square = [torch.zeros((), device=device), torch.zeros((), device=device)]
    for name, grad in grads.items():
        square[name in eps] += grad.float().square().sum()
    comms = {id(ep.comm.group): ep.comm for ep in eps.values()}
    if len(comms) > 1:
        raise NotImplementedError(f"moec.torch: the eps have {len(comms)} groups; one can be used")
    for one in comms.values():
        parted_square = square[1].to(one.group_device)
        dist.all_reduce(parted_square, group=one.group)
        square[1] = parted_square.to(device)
    norm = (square[0] + square[1]).sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads.values():
        grad.mul_(factor)
    return norm
