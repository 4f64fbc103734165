# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of a batch by NCCL's collectives with the least around them, in the form of
ep_transports: NCCL's functions are called without PyTorch in between, own rows are not copied, and
what can lie in place lies there."""

import ctypes
import os

import torch
import torch.nn.functional as F
from ep_transports import Transport
from moec.torch._parallel import _nccl_comm

BYTE = 1  # ncclUint8


class Nccl:
    """Collectives of bytes on torch's stream, by the communicator and the libnccl of torch."""

    def __init__(self, ranks):
        self.ranks = ranks
        self._comm = ctypes.c_void_p(_nccl_comm(torch.distributed.group.WORLD, ranks.device))
        self._library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_LAZY | os.RTLD_NOLOAD)

    def _call(self, name, *arguments):
        if status := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name}: NCCL's status {status}")

    def _end(self):
        return self._comm, ctypes.c_void_p(self.ranks.stream().cuda_stream)

    def all_gather(self, everyone):
        """everyone [N,...]: each rank's own part lies there already."""
        own = everyone[self.ranks.rank]
        self._call("ncclAllGather", pointer(own), pointer(everyone), num_bytes(own), BYTE,
                   *self._end())

    def exchange(self, to, parts):
        """to[r] is what rank r has in parts[own rank]; of [N,...]. Own parts stay where they are.
        """
        self._call("ncclGroupStart")
        for rank in range(self.ranks.size):
            if rank != self.ranks.rank:
                size, peer = num_bytes(to[rank]), ctypes.c_int(rank)
                self._call("ncclSend", pointer(parts[rank]), size, BYTE, peer, *self._end())
                self._call("ncclRecv", pointer(to[rank]), size, BYTE, peer, *self._end())
        self._call("ncclGroupEnd")


def pointer(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


def num_bytes(tensor):
    return ctypes.c_size_t(tensor.numel() * tensor.element_size())


def beside(batch):
    """[T,2H + 8K] bytes: rows, ids and weights of a token side by side."""
    return torch.cat([t.contiguous().view(torch.uint8)
                      for t in (batch.x, batch.ids, batch.weights)], 1)


def by_gather(batch):
    """One all-gather, and equal parts of partial rows back with their sum."""
    nccl, ranks, (tokens, hidden) = Nccl(batch.ranks), batch.ranks, batch.x.shape
    own = beside(batch)
    everyone = own.new_empty(ranks.size, *own.shape)
    everyone[ranks.rank] = own
    partial, home = (batch.x.new_empty(ranks.size, tokens, hidden) for _ in range(2))
    y = torch.empty_like(batch.x)

    def echo():
        begin = 2 * hidden + 4 * batch.ids.shape[1]
        rows = everyone[..., :2 * hidden].contiguous().view(torch.bfloat16)
        ids = everyone[..., 2 * hidden:begin].contiguous().view(torch.int32)
        partial.copy_(rows * (ids // batch.each == ranks.rank).any(-1, keepdim=True))
        home[ranks.rank] = partial[ranks.rank]

    def combine():
        nccl.exchange(home, partial)
        if ranks.size == 2:
            torch.add(*home, out=y)
        else:
            torch.sum(home, 0, out=y)

    return Transport(lambda: nccl.all_gather(everyone), echo, combine, lambda: y)


def by_equal_parts(batch):
    """As many rows as a pair of ranks needs, from and to places that are known before."""
    nccl, ranks, (tokens, hidden) = Nccl(batch.ranks), batch.ranks, batch.x.shape
    places = batch.capacity
    source = torch.zeros(ranks.size, places, dtype=torch.int64, device=ranks.device)
    back = torch.full((tokens, ranks.size), ranks.size * places, device=ranks.device)
    for rank in range(ranks.size):
        sent = batch.hits[:, rank].nonzero().flatten()
        source[rank, :len(sent)] = sent
        back[sent, rank] = rank * places + torch.arange(len(sent), device=ranks.device)
    own = beside(batch).view(torch.int32)
    packed = own.new_empty(ranks.size * places, own.shape[1])
    parts = packed.view(ranks.size, places, -1)
    came = torch.empty_like(parts)
    partial = batch.x.new_empty(ranks.size, places, hidden)
    held = batch.x.new_zeros(ranks.size * places + 1, hidden)  # the last row: no partial row
    home = held[:-1].view_as(partial)
    made = {}

    def dispatch():
        torch.index_select(own, 0, source.flatten(), out=packed)
        nccl.exchange(came, parts)

    def echo():
        came[ranks.rank] = parts[ranks.rank]
        partial.copy_(came[..., :hidden // 2].contiguous().view(torch.bfloat16))
        home[ranks.rank] = partial[ranks.rank]

    def combine():
        nccl.exchange(home, partial)
        made["y"] = F.embedding_bag(back, held, mode="sum")

    return Transport(dispatch, echo, combine, lambda: made["y"])


WAYS = (by_gather, by_equal_parts)
