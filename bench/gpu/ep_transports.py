# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of one batch by several implementations: tokens go to the ranks of their
experts, and what comes back for each is added up.

Each function returns a Transport. Its `echo` makes the rows that came the ones that go back, so
that dispatch, echo and combine give x times a number that is known: each is checked before it is
timed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import moec
import moec.torch
import torch
import torch.distributed as dist
from moec.torch._eps import view_of

SCHEMES = ("auto", "peer", "gather", "rows", "exact")


@dataclass
class Transport:
    dispatch: Callable[[], Any]
    echo: Callable[[], Any]
    combine: Callable[[], Any]
    result: Callable[[], torch.Tensor]
    slots_count: bool = False
    """y is x times K instead of x times the ranks that have an expert of the token"""
    can_capture: bool = True
    can_repeat: bool = True
    """each may follow itself, and takes no longer then"""
    extra: Callable[[], dict] = dict
    """what a row says beside its time"""
    held: list[Any] = field(default_factory=list)

    def pair(self):
        self.dispatch()
        self.combine()


def scheme_ep(batch, scheme, **wanted):
    """An ep of a scheme by its name, or the error that refuses it."""
    hidden, _, experts, top_k = batch.shape
    desc = dict(hidden=hidden, max_tokens=batch.tokens, num_experts=experts, top_k=top_k,
                scheme=moec.EpScheme[scheme.upper()], dtype="bf16",
                pair_rows=batch.capacity if scheme == "rows" else 0)
    return moec.torch.EP(batch.ranks.comm, moec.EpDesc(**desc | wanted))


def moec_scheme(batch, scheme):
    ep = scheme_ep(batch, scheme)
    context, y = ep.comm.context, torch.empty_like(batch.x)
    views = []

    def dispatch():
        views[:] = [ep.dispatch_raw(batch.x, batch.ids, batch.weights,
                                    stream=batch.ranks.stream())]

    def echo():
        view_of(views[0].partial).copy_(view_of(views[0].guests))

    def combine():
        ep.combine(y, stream=batch.ranks.stream())

    def extra():
        """Waits and allocations of warm calls, and what the scheme says of itself."""
        dispatch()
        combine()
        before = context.stats()
        for _ in range(3):
            dispatch()
            combine()
        after, said = context.stats(), ep.describe()
        return dict(scheme=said["scheme"], host_syncs=after.host_syncs - before.host_syncs,
                    allocs=after.allocs - before.allocs, dropped=ep.state().rows_dropped,
                    **{name: said[name] for name in ("blocks",) if name in said})

    return Transport(dispatch, echo, combine, lambda: y, extra=extra, held=[ep],
                     can_capture=ep.scheme != moec.EpScheme.EXACT,
                     can_repeat=ep.scheme != moec.EpScheme.PEER)


# ---- torch.distributed, as training frameworks use it
class Splits:
    """A row for each (token, slot), those of one expert together: their order, and how many go to
    and come from each rank, which the host waits for."""

    def __init__(self, ids, experts, size):
        flat = ids.flatten()
        counts = torch.zeros(experts, dtype=flat.dtype, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        both = torch.stack([counts, theirs]).view(2, size, -1).sum(2)
        self.sent, self.received = both.tolist()
        self.order = flat.argsort(stable=True)
        each = experts // size
        local = torch.arange(each, device=ids.device).repeat(size)
        expert = local.repeat_interleave(theirs, output_size=sum(self.received))
        self.by_expert = expert.argsort(stable=True)
        self.ends = theirs.view(size, each).sum(0).cumsum(0).int()

    @staticmethod
    def inverse(order):
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return back


def torch_slots(batch):
    """all_to_all_single of (token, slot) rows, with what goes before and after it."""
    ranks, (tokens, hidden) = batch.ranks, batch.x.shape
    top_k, experts = batch.ids.shape[1], batch.shape[2]
    at = {}

    def dispatch():
        at["splits"] = splits = Splits(batch.ids.long(), experts, ranks.size)
        came = batch.x.new_empty(sum(splits.received), hidden)
        dist.all_to_all_single(came, batch.x[splits.order // top_k], splits.received, splits.sent)
        at["rows"] = came[splits.by_expert]

    def combine():
        splits = at["splits"]
        home = batch.x.new_empty(tokens * top_k, hidden)
        dist.all_to_all_single(home, at["rows"][splits.inverse(splits.by_expert)], splits.sent,
                               splits.received)
        at["y"] = home[splits.inverse(splits.order)].view(tokens, top_k, hidden).sum(1)

    return Transport(dispatch, lambda: None, combine, lambda: at["y"], slots_count=True,
                     can_capture=False)


def transports(batch):
    """{impl: [a function that makes one]}; of several the fastest counts."""
    made = {scheme: [lambda s=scheme: moec_scheme(batch, s)] for scheme in SCHEMES}
    if batch.ranks.on_gpu:
        import ep_nccl
        made["nccl"] = [lambda w=way: w(batch) for way in ep_nccl.WAYS]
    return made | {"torch": [lambda: torch_slots(batch)]}


def is_right(batch, transport):
    """On every rank: what comes back is x times the number of those who sent it."""
    transport.dispatch()
    transport.echo()
    transport.combine()
    top_k = batch.ids.shape[1]
    times = torch.full_like(batch.hits[:, :1], top_k, dtype=torch.int64) \
        if transport.slots_count else batch.hits.sum(1, keepdim=True)
    wrong = (transport.result().float() != batch.x.float() * times).any(1).sum()
    return batch.ranks.most(int(wrong)) == 0
