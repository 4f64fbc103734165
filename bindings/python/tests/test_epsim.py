# SPDX-License-Identifier: Apache-2.0
"""moec epsim: its counts beside plain loops, its times by hand, its files."""

from __future__ import annotations

import json
from dataclasses import replace
from math import comb
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from moec import cli, epsim, shapes

SHAPE = replace(shapes.find("qwen3-30b"), experts=11, top_k=3, hidden=16)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["epsim", *(str(a) for a in arguments)],
                              env={"COLUMNS": "200"})


@pytest.mark.parametrize("ranks", [1, 2, 5, 11])
@pytest.mark.parametrize("skew", [0.0, 4.0])
def test_counts_are_those_of_plain_loops(ranks: int, skew: float) -> None:
    tokens = 13
    traffic = epsim.route(SHAPE, ranks, tokens, skew=skew, seed=ranks)
    rng = np.random.default_rng(ranks)
    popular = np.float32(skew) * rng.standard_normal(11, np.float32)
    once = np.zeros((ranks, ranks), int)
    slots = np.zeros((ranks, ranks), int)
    for sender in range(ranks):
        for logits in rng.standard_normal((tokens, 11), np.float32) + popular:
            chosen = sorted(range(11), key=lambda e: -logits[e])[:3]
            owners = [next(r for r in range(ranks) if e < 11 * (r + 1) // ranks) for e in chosen]
            for owner in owners:
                slots[sender, owner] += 1
            for owner in set(owners):
                once[sender, owner] += 1
    assert (traffic.tokens == once).all() and (traffic.slots == slots).all()
    assert (traffic.plan_rows == slots.sum(0)).all()
    assert traffic.dropped("rows") == sum(max(0, n - traffic.pair_rows) for n in once.ravel())
    assert traffic.dropped("gather") == traffic.dropped("exact") == 0


def test_even_routing_sends_what_chance_says() -> None:
    shape = shapes.find("qwen3-30b")
    for ranks in (2, 8, 32):
        traffic = epsim.route(shape, ranks, 512)
        away = traffic.tokens.sum() - np.trace(traffic.tokens)
        others = comb(shape.experts - shape.experts // ranks, shape.top_k)
        hit = 1 - others / comb(shape.experts, shape.top_k)
        assert away / (ranks * 512) == pytest.approx((ranks - 1) * hit, rel=0.02)


def test_times_by_hand() -> None:
    # Ranks 0 and 1 share a node; rank 2 is alone in the next.
    tokens = np.array([[5, 4, 2], [2, 6, 2], [3, 0, 7]])
    traffic = epsim.Traffic(10, tokens, 2 * tokens, 2 * tokens.sum(0))
    links = epsim.Link(2.0, 10.0), epsim.Link(5.0, 1.0, 0.5)
    topology = epsim.Topology("small", 2, *links)

    def of(scheme: str, op: str) -> epsim.Result:
        return epsim.replay(traffic, scheme, op, 1000, 24, topology)

    # Rank 2 gets 4 rows of 2 ranks over the network, and sends them back; ids first: 2 rounds.
    assert of("peer", "dispatch").us == pytest.approx(5 + 2 * 0.5 + 4 * 1024 / 1e3)
    assert of("exact", "dispatch").us == pytest.approx(2 * (5 + 2 * 0.5) + 4 * 1024 / 1e3)
    assert of("exact", "combine").us == pytest.approx(5 + 2 * 0.5 + 4 * 1000 / 1e3)
    assert of("gather", "combine").us == pytest.approx(5 + 2 * 0.5 + 2 * 10 * 1000 / 1e3)
    assert of("slots", "combine").us == pytest.approx(5 + 2 * 0.5 + 8 * 1000 / 1e3)
    peer, back = of("peer", "dispatch"), of("peer", "combine")
    assert (peer.messages, peer.most_bytes, peer.network_bytes) == (2, 6 * 1024, 7 * 1024)
    assert (back.messages, back.most_bytes, back.network_bytes) == (2, 5 * 1000, 7 * 1000)
    assert (peer.pair_bytes, back.pair_bytes) == (4 * 1024, 4 * 1000)
    assert of("gather", "combine").pair_bytes == 10 * 1000
    assert of("exact", "dispatch").messages == 4
    assert peer.mean_bytes == pytest.approx(13 * 1024 / 3)
    # What was measured of one scheme has all its rounds, and holds inside a node alone.
    known = replace(topology, ranks_per_node=3,
                    schemes={"exact": {"dispatch": epsim.Link(7.0, 20.0, 0.25)}})
    found = epsim.replay(traffic, "exact", "dispatch", 1000, 24, known)
    assert found.us == pytest.approx(7 + 2 * 0.25 + 6 * 1024 / 20e3)
    assert epsim.replay(traffic, "exact", "combine", 1000, 24, known).us == pytest.approx(2 + 0.6)
    between = replace(known, ranks_per_node=2)
    assert epsim.replay(traffic, "exact", "dispatch", 1000, 24, between).us == \
        of("exact", "dispatch").us
    slow = replace(topology, node=epsim.Link(90.0, 10.0))  # the slower of both links counts
    assert epsim.replay(traffic, "peer", "combine", 1000, 0, slow).us == pytest.approx(90.4)
    alone = epsim.Traffic(10, tokens[:1, :1], tokens[:1, :1], tokens[0, :1])
    assert epsim.replay(alone, "gather", "dispatch", 1000, 24, topology).us == 0


def test_the_command(tmp_path: Path) -> None:
    topology, measured, out = (tmp_path / name for name in ("t.json", "m.json", "out.json"))
    topology.write_text(json.dumps({
        "name": "two", "ranks_per_node": 1, "node": {"latency_us": 1, "gb_per_s": 100},
        "network": {"latency_us": 4, "gb_per_s": 50, "message_us": 1}}))
    measured.write_text(json.dumps({"ranks": 4, "rows": [
        {"shape": "qwen3-30b", "tokens": 32, "op": "combine", "impl": "gather", "us": 5.0},
        {"shape": "qwen3-30b", "tokens": 64, "op": "combine", "impl": "gather", "us": 9.0}]}))
    done = invoke("-m", "qwen3-30b", "-r", 2, "-r", 4, "-t", 32, "--topology", topology,
                  "--measured", measured, "--json", out)
    assert done.exit_code == 0, done.output
    assert "combine gather: measured 5.0 us, model 14.9" in done.output and "two" in done.output
    runs = json.loads(out.read_text())["runs"]
    assert [run["ranks"] for run in runs] == [2, 4]
    pairs = epsim.route(shapes.find("qwen3-30b"), 4, 32).tokens
    assert runs[1]["pair_tokens"] == pairs.tolist()
    assert len(runs[1]["errors"]) == 1 and not runs[0]["errors"]
    us = 4 + 3 + 3 * 32 * 2048 * 2 / 50e3
    assert runs[1]["errors"][0]["error"] == pytest.approx(us / 5 - 1)
    schemes = {result["scheme"] for result in runs[1]["results"]}
    assert schemes == set(epsim.SCHEMES) - {"peer"}  # which is for the ranks of one node
    wide = invoke("-m", "qwen3-30b", "-r", 256, "-t", 2, "--experts", 512)
    assert wide.exit_code == 0 and "512 experts;" in wide.output


@pytest.mark.parametrize(("field", "value", "says"), [
    ("ranks_per_node", 0, "ranks_per_node is 0; expected 1 or more"),
    ("node", {"latency_us": 1}, "gb_per_s"),
    ("node", {"latency_us": 1, "gb_per_s": 0}, "gb_per_s is 0; expected a number above 0"),
    ("network", {"latency_us": -1, "gb_per_s": 1}, "latency_us is -1; expected a number 0 or"),
    ("network", 3, "expected an object of latency_us, gb_per_s, message_us; got 3"),
    ("color", 1, "expected an object of name"),
    ("schemes", {"lost": {}}, "expected an object of gather, rows, exact, peer, slots"),
    ("schemes", {"peer": {"up": {}}}, "schemes: peer: expected an object of dispatch, combine"),
    ("schemes", {"peer": {"combine": 1}}, "schemes: peer: combine: expected an object of latency"),
])
def test_a_wrong_topology(tmp_path: Path, field: str, value: object, says: str) -> None:
    file = tmp_path / "t.json"
    link = {"latency_us": 1, "gb_per_s": 1}
    right = {"name": "n", "ranks_per_node": 1, "node": link, "network": link}
    file.write_text(json.dumps(right | {field: value}))
    with pytest.raises(ValueError, match="t.json") as error:
        epsim.read_topology(file)
    assert says in str(error.value)
    assert invoke("-m", "qwen3-30b", "--topology", file).exit_code == 2


def test_wrong_options(tmp_path: Path) -> None:
    assert "more than the 128 experts" in invoke("-m", "qwen3-30b", "-r", 129).output
    assert "less than top-k, 8" in invoke("-m", "qwen3-30b", "--experts", 7).output
    file = tmp_path / "m.json"
    file.write_text('{"rows": [{"us": 1}]}')
    assert "rows need" in invoke("-m", "qwen3-30b", "--measured", file).output
    file.write_text('{"rows": [], "ranks": "2"}')
    assert "ranks is '2'" in invoke("-m", "qwen3-30b", "--measured", file).output
    with pytest.raises(ValueError, match="12 ranks for 11 experts"):
        epsim.route(SHAPE, 12, 4)
