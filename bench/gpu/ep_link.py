# SPDX-License-Identifier: Apache-2.0
"""What the link between GPUs of one host can do: every rank writes to the memory of all others at
once, to each a part in turn, so that no two write to the same one, by the copy engine and by a
kernel's stores; and what it takes until all ranks have met."""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from clock import graph_of

BYTES = 256 << 20
BARRIERS = 20


def limits(ranks, seconds, rounds):
    """{copy_gb_per_s, store_gb_per_s, write_gb_per_s, barrier_us}"""
    words = BYTES // 4
    own = symmetric.empty(words, dtype=torch.int32, device=ranks.device)
    handle = symmetric.rendezvous(own, dist.group.WORLD)
    source = torch.randint(1 << 30, (words,), dtype=torch.int32, device=ranks.device)
    others = [handle.get_buffer((ranks.rank + step) % ranks.size, (words,), torch.int32)
              for step in range(1, ranks.size)]
    pairs = [(source.chunk(len(others))[at], peer.chunk(len(others))[at])
             for at, peer in enumerate(others)]
    runs = {
        "copy": (graph_of(lambda: [to.copy_(part) for part, to in pairs]), 1),
        "store": (graph_of(lambda: [torch.bitwise_not(part, out=to) for part, to in pairs]), 1),
        "barrier": (graph_of(lambda: [handle.barrier(channel=0) for _ in range(BARRIERS)]),
                    BARRIERS),
    }
    measured = {name: us for name, (us, _) in
                ranks.take_turns(runs, seconds, rounds).items()}
    found = {f"{name}_gb_per_s": round(BYTES / measured[name] / 1e3, 1)
             for name in ("copy", "store")}
    return found | {"write_gb_per_s": max(found.values()),
                    "barrier_us": round(measured["barrier"], 2)}


def least_us(link, num_bytes):
    """What moving so many bytes one way and one barrier take at these limits."""
    if not link:
        return None
    return num_bytes / link["write_gb_per_s"] / 1e3 + link["barrier_us"]
