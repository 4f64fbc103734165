# SPDX-License-Identifier: Apache-2.0
"""moec epsim: expert parallelism on logical ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import epsim
from .._tensors import numpy_dtype
from ._common import DTypeOption, Model, console, out_file, to_bytes, wide_table

EXAMPLE = "moec epsim --model qwen3-30b --ranks 8 --ranks 64 --tokens 4096"


def _topology(name: str) -> epsim.Topology:
    try:
        return epsim.read_topology(Path(name))
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None


def _measured(name: str) -> Path:
    try:
        file = json.loads(Path(name).read_text())
        rows, ranks = file["rows"], file.get("ranks", 2)
        keys = {"shape", "tokens", "op", "impl", "us"}
        if type(ranks) is not int or ranks < 1:
            raise ValueError(f"{name}: ranks is {ranks!r}; expected 1 or more")
        if not isinstance(rows, list) or not all(keys <= set(row) for row in rows):
            raise ValueError(f"{name}: rows need {', '.join(sorted(keys))}")
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise typer.BadParameter(f"{name}: {error}") from None
    return Path(name)


def command(
    model: Model,
    ranks: Annotated[
        list[int] | None, typer.Option("--ranks", "-r", min=1, help="May be repeated. 2, 8, 64.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-t", min=1, help="Of each rank.")] = 1024,
    dtype: DTypeOption = "bf16",
    experts: Annotated[
        int, typer.Option("--experts", min=0, help="Instead of the model's; 0: its own.")
    ] = 0,
    skew: Annotated[
        float, typer.Option("--skew", min=0, help="How much some experts are preferred.")
    ] = 0.0,
    topology: Annotated[
        epsim.Topology | None,
        typer.Option("--topology", parser=_topology, metavar="FILE",
                     help="JSON: name, ranks_per_node, node and network of latency_us, gb_per_s "
                          "and message_us; schemes of {SCHEME: {dispatch, combine}} of these."),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option("--measured", parser=_measured, metavar="FILE",
                     help="JSON of rows measured on `ranks` GPUs (2 without it): prints the "
                          "model's errors."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    out: Annotated[
        Path | None, typer.Option("--json", callback=out_file, help="Write all numbers there.")
    ] = None,
) -> None:
    """Route tokens of N logical ranks; print bytes, messages and modelled times of each scheme.

    Routing and plans are those of the library. Times come from a model of the topology.
    """
    shape = replace(model, experts=experts) if experts else model
    if shape.top_k > shape.experts:
        raise typer.BadParameter(f"--experts {shape.experts} is less than top-k, {shape.top_k}")
    where = topology or epsim.DEFAULT
    file = json.loads(measured.read_text()) if measured else {"rows": []}
    report: list[dict[str, Any]] = []
    for count in ranks or [n for n in (2, 8, 64) if n <= shape.experts]:
        if count > shape.experts:
            raise typer.BadParameter(f"--ranks {count} is more than the {shape.experts} experts; "
                                     "--experts gives more")
        traffic = epsim.route(shape, count, tokens, skew=skew, seed=seed)
        results = epsim.simulate(shape, traffic, where,
                                 element_bytes=numpy_dtype(dtype).itemsize)
        mean = traffic.plan_rows.mean()
        console.print(
            f"{shape.name}, {shape.experts} experts; {where.name}; "
            f"rows of a plan: mean {mean:.0f}, most {traffic.plan_rows.max()}", highlight=False)
        title = f"{count} ranks of {tokens} tokens"
        shown = wide_table(title, "scheme", "op", "messages", "mean", "most", "pair",
                           "dropped", "us")
        for r in results:
            shown.add_row(r.scheme, r.op, str(r.messages), to_bytes(r.mean_bytes),
                          to_bytes(r.most_bytes), to_bytes(r.pair_bytes), str(r.dropped),
                          f"{r.us:.1f}")
        console.print(shown)
        rows = file["rows"] if count == file.get("ranks", 2) else []
        compared = epsim.errors_of(rows, shape, tokens, results)
        for r, us, error in compared:
            console.print(f"{r.op} {r.scheme}: measured {us:.1f} us, model {r.us:.1f}, "
                          f"error {error:+.0%}", highlight=False)
        report.append({"ranks": count, "plan_rows": traffic.plan_rows.tolist(),
                       "pair_rows": traffic.pair_rows, "pair_tokens": traffic.tokens.tolist(),
                       "results": epsim.to_json(results),
                       "errors": [{"op": r.op, "scheme": r.scheme, "measured_us": us,
                                   "error": error} for r, us, error in compared]})
    if out:
        about = {"shape": shape.name, "experts": shape.experts, "tokens": tokens, "dtype": dtype,
                 "skew": skew, "seed": seed, "topology": where.name, "runs": report}
        out.write_text(json.dumps(about, indent=1) + "\n")
