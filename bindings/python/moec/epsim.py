# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism on logical ranks: who sends how much to whom, and how long that would take.

Tokens are routed by moec.Router, and moec.Plan says what rows each rank's experts get. Times are a
model: a rank's rounds x latency + messages x the cost of one + bytes / rate, on its busiest link;
the slowest rank counts. Where a scheme was measured inside a node, its own latency and rate hold
there, of all its rounds and kernels. Contention of a network between ranks is not in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from ._context import Context
from ._descriptors import PlanDesc, RouterDesc
from ._plan import Plan
from ._router import Router
from .shapes import Shape

Counts = np.ndarray[Any, np.dtype[np.int64]]
SCHEMES = ("gather", "rows", "exact", "peer", "slots")
OPS = ("dispatch", "combine")
# "peer" is kernels that store rows and ids to the memory of ranks of their node; others send ids
# first. "slots" is what other all-to-all paths send: a row for each (token, slot), after counts.
DISPATCH_ROUNDS = {"gather": 2, "rows": 2, "exact": 2, "peer": 1, "slots": 2}


@dataclass(frozen=True, slots=True)
class Link:
    """Alpha and beta of one kind of link, for each rank and direction."""

    latency_us: float
    gb_per_s: float
    message_us: float = 0.0
    """for each peer of a round"""

    def __post_init__(self) -> None:
        for name in ("latency_us", "gb_per_s", "message_us"):
            value = getattr(self, name)
            least = "above 0" if name == "gb_per_s" else "0 or more"
            number = isinstance(value, int | float) and np.isfinite(value)
            if not number or value < 0 or (value == 0 and name == "gb_per_s"):
                raise ValueError(f"{name} is {value!r}; expected a number {least}")


@dataclass(frozen=True, slots=True)
class Topology:
    """Nodes of equally many ranks: one link inside a node, another between nodes."""

    name: str
    ranks_per_node: int
    node: Link
    network: Link
    schemes: Mapping[str, Mapping[str, Link]] = field(default_factory=dict)
    """{scheme: {op: inside a node, with all its rounds and kernels}} of those that were measured"""


# Inside: stores to a peer over 18 NVLinks and a barrier kernel; schemes as lines through the rows
# of bench/results/h200_x2/ep.json, relative errors least. Between: assumed, one 400 Gb/s card for
# each GPU.
DEFAULT = Topology(
    "H100 or H200, 8 a node, 400 Gb/s", 8, Link(7.2, 391.0), Link(10.0, 45.0, 0.7), {
        "peer": {"dispatch": Link(5.3, 350.0), "combine": Link(5.4, 324.0)},
        "gather": {"dispatch": Link(38.7, 229.0), "combine": Link(13.2, 208.0)},
        "rows": {"dispatch": Link(36.9, 208.0), "combine": Link(13.2, 207.0)},
        "exact": {"dispatch": Link(217.0, 309.0), "combine": Link(68.9, 296.0)},
    })


def _object(value: Any, names: Sequence[str], where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) - set(names):
        raise ValueError(f"{where}: expected an object of {', '.join(names)}; got {value!r}")
    return value


def _made(kind: Any, value: Any, where: str) -> Any:
    _object(value, [one.name for one in fields(kind)], where)
    try:
        return kind(**value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def read_topology(path: Path) -> Topology:
    """A topology file: the fields of Topology as JSON. ValueError says what is wrong in it."""
    try:
        made = _made(Topology, json.loads(path.read_text()), str(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    if type(made.ranks_per_node) is not int or made.ranks_per_node < 1:
        raise ValueError(f"{path}: ranks_per_node is {made.ranks_per_node!r}; expected 1 or more")
    links = {name: _made(Link, getattr(made, name), f"{path}: {name}")
             for name in ("node", "network")}
    own = {scheme: {op: _made(Link, link, f"{path}: schemes: {scheme}: {op}")
                    for op, link in _object(ops, OPS, f"{path}: schemes: {scheme}").items()}
           for scheme, ops in _object(made.schemes, SCHEMES, f"{path}: schemes").items()}
    return Topology(str(made.name), made.ranks_per_node, schemes=own, **links)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the routing of one batch makes of N ranks of T tokens."""

    num_tokens: int
    tokens: Counts
    """[N,N] tokens of rank s that have an expert at rank d, each once"""
    slots: Counts
    """[N,N] the same with a row for each slot"""
    plan_rows: Counts
    """[N] rows in the plan of each rank's guests"""

    @property
    def pair_rows(self) -> int:
        """ROWS: mean + 4 sigma of the tokens of a pair, which few pairs exceed."""
        p = float(self.tokens.mean()) / self.num_tokens
        spread = 4 * (self.num_tokens * p * (1 - p)) ** 0.5
        return min(self.num_tokens, int(np.ceil(self.num_tokens * p + spread)))

    def rows(self, scheme: str) -> Counts:
        """[N,N] rows that rank s sends to rank d."""
        if scheme == "slots":
            return self.slots
        if scheme in ("exact", "peer"):
            return self.tokens
        each = self.num_tokens if scheme == "gather" else self.pair_rows
        return np.full_like(self.tokens, each)

    def dropped(self, scheme: str) -> int:
        """Rows beyond pair_rows, of all ranks."""
        return int((self.tokens - self.pair_rows).clip(0).sum()) if scheme == "rows" else 0


def route(
    shape: Shape, num_ranks: int, num_tokens: int, *, skew: float = 0.0, seed: int = 0
) -> Traffic:
    """Traffic of random logits, N(0,1) + skew x N(0,1) of the expert. ValueError: too few experts.
    """
    experts, slots = shape.experts, shape.top_k
    if num_ranks > experts:
        raise ValueError(f"{num_ranks} ranks for {experts} experts; each rank needs one or more")
    begin = experts * np.arange(num_ranks + 1, dtype=np.int64) // num_ranks
    rng = np.random.default_rng(seed)
    popular = np.float32(skew) * rng.standard_normal(experts, np.float32)
    context = Context("cpu")
    ids = np.empty((num_ranks, num_tokens, slots), np.int32)
    with Router(context, RouterDesc(num_experts=experts, top_k=slots)) as router:
        for rank in range(num_ranks):
            logits = rng.standard_normal((num_tokens, experts), np.float32) + popular
            ids[rank] = router.route(logits).expert_ids

    ids = ids.reshape(-1, slots)
    owner = np.searchsorted(begin, ids, "right") - 1
    token = np.arange(len(ids), dtype=np.int64)[:, None]

    def by_pair(keys: Counts) -> Counts:
        rank, sender = keys // len(ids), keys % len(ids) // num_tokens
        pairs = np.bincount(sender * num_ranks + rank, minlength=num_ranks**2)
        return pairs.reshape(num_ranks, num_ranks)

    rows = (owner * len(ids) + token).ravel()
    visits = np.unique(rows)  # by rank, then by token: the order of guests
    first = np.searchsorted(visits, np.arange(num_ranks + 1) * len(ids))
    plan_rows = np.zeros(num_ranks, np.int64)
    for rank in range(num_ranks):
        guests = ids[visits[first[rank]:first[rank + 1]] % len(ids)]
        if not len(guests):
            continue
        desc = PlanDesc(num_experts=experts, top_k=slots, max_tokens=len(guests),
                        expert_begin=int(begin[rank]), expert_end=int(begin[rank + 1]))
        with Plan(context, desc) as plan:
            plan_rows[rank] = plan.from_topk(guests).totals().routed_rows
    return Traffic(num_tokens, by_pair(visits), by_pair(rows), plan_rows)


@dataclass(frozen=True, slots=True)
class Result:
    """One scheme in one direction."""

    op: str
    scheme: str
    messages: int
    """to other ranks, of the rank that sends most"""
    mean_bytes: float
    most_bytes: int
    pair_bytes: int
    """from one rank to one other, of the pair that has most"""
    network_bytes: int
    """of all ranks, between nodes"""
    dropped: int
    us: float


def replay(traffic: Traffic, scheme: str, op: str, row_bytes: int, beside_bytes: int,
           topology: Topology) -> Result:
    """Times of what `scheme` sends in `op`: rows, and in a dispatch what lies beside each."""
    rows = traffic.rows(scheme)
    if op == "combine":
        rows = rows.T
    num_ranks = len(rows)
    rounds = DISPATCH_ROUNDS[scheme] if op == "dispatch" else 1
    sent = rows * (row_bytes + (beside_bytes if op == "dispatch" else 0))
    node = np.arange(num_ranks) // topology.ranks_per_node
    inside = node[:, None] == node[None, :]
    foreign = ~np.eye(num_ranks, dtype=bool)
    longest = 0.0
    own = topology.schemes.get(scheme, {}).get(op)
    for link, times, pairs in ((own or topology.node, 1 if own else rounds, inside & foreign),
                               (topology.network, rounds, ~inside)):
        moved = np.where(pairs, sent, 0)
        for axis in (0, 1):
            peers, total = (moved > 0).sum(axis), moved.sum(axis)
            us = times * (link.latency_us + peers * link.message_us)
            us = np.where(peers > 0, us + total / (link.gb_per_s * 1e3), 0.0)
            longest = max(longest, float(us.max()))
    out = np.where(foreign, sent, 0)
    return Result(op, scheme, rounds * int((out > 0).sum(1).max()), float(out.sum(1).mean()),
                  int(out.sum(1).max()), int(out.max()), int(np.where(inside, 0, sent).sum()),
                  traffic.dropped(scheme), longest)


def simulate(shape: Shape, traffic: Traffic, topology: Topology, *,
             element_bytes: int) -> list[Result]:
    """Both directions of each scheme that the ranks can have. A row has `hidden` elements; ids and
    weights go beside it.
    """
    results = []
    one_node = len(traffic.tokens) <= topology.ranks_per_node
    for scheme in SCHEMES if one_node else (s for s in SCHEMES if s != "peer"):
        beside = 8 if scheme == "slots" else 8 * shape.top_k
        results += [replay(traffic, scheme, op, shape.hidden * element_bytes, beside, topology)
                    for op in OPS]
    return results


def errors_of(measured: Sequence[dict[str, Any]], shape: Shape, num_tokens: int,
              results: Sequence[Result]) -> list[tuple[Result, float, float]]:
    """(result, measured us, error of the model) of rows {shape, tokens, op, impl, us}."""
    found = []
    for result in results:
        for row in measured:
            key = tuple(row.get(name) for name in ("shape", "tokens", "op", "impl"))
            if key == (shape.name, num_tokens, result.op, result.scheme):
                found.append((result, float(row["us"]), result.us / float(row["us"]) - 1))
    return found


def to_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    return [asdict(result) for result in results]
