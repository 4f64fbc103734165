# SPDX-License-Identifier: Apache-2.0
"""What pages say about experts on several GPUs, made of bench/results/<gpu>_x<N>/ep.json: each
function makes lines of Markdown, none where nothing was measured."""

from ep_goals import HEADLINE_TOKENS, EpRows, summary
from report_tables import cell, join, span, three

SUPPORT = "| [expert parallelism](docs/howto/ranks.md) |"  # how README's row begins


def files(r):
    """(path, rows) of each machine."""
    return [(path, EpRows.read(path)) for path in sorted(r.results.glob("*/ep.json"))]


def us(value):
    if value is None:
        return "-"
    return three(value) if value < 1000 else f"{value:.0f}"


def link_text(link):
    if not link:
        return "the link was not measured"
    return (f"a GPU writes {link['write_gb_per_s']:.0f} GB/s to the next while all do, and a "
            f"barrier kernel takes {link['barrier_us']:.1f} us")


def transport_table(r, path, rows):
    lines = [f"Rows there and back, in us: {rows.file['machine']}, {r.link(path)}; "
             f"{link_text(rows.file['link'])}:", "",
             "| layer | tokens a rank | limit | dispatch | combine | pair | scheme | x NCCL "
             "| x torch |", "|---|--:|--:|--:|--:|--:|---|--:|--:|"]
    for case in rows.cases:
        pair = rows.all.get((*case, "pair", "auto"))
        if not pair:
            continue
        times = (us(rows.us(case, op)) for op in ("dispatch", "combine", "pair"))
        faster = (cell(rows.faster(case, "pair", peer)) for peer in ("nccl", "torch"))
        lines.append(f"| {case[0]} | {case[1]} | {us(rows.limit(case, 'dispatch'))} "
                     f"| {' | '.join(times)} | {pair['scheme']} | {' | '.join(faster)} |")
    return lines


SIDE_BY_SIDE = ("peer", "gather", "rows", "exact")


def scheme_table(rows):
    """A pair by each scheme, and what epsim says of it."""
    lines = ["A pair by each scheme, in us, and how far `moec epsim` is off:", "",
             f"| layer | tokens a rank | {' | '.join(SIDE_BY_SIDE)} | NCCL's own | torch |",
             f"|---|--:|{'--:|' * (len(SIDE_BY_SIDE) + 2)}"]
    for case in rows.cases:
        cells = []
        for impl in (*SIDE_BY_SIDE, "nccl", "torch"):
            text, row = us(rows.us(case, "pair", impl)), rows.all.get((*case, "pair", impl), {})
            if row.get("model_us"):
                text += f", {row['model_us'] / row['us'] - 1:+.0%}"
            cells.append(text)
        if set(cells) != {"-"}:
            lines.append(f"| {case[0]} | {case[1]} | {' | '.join(cells)} |")
    return lines


def layer_table(rows):
    lines = ["Whole layers; efficiency is one GPU's time for the tokens of all ranks, over their "
             "number, beside the ranks' time; local is a rank's work on the same rows without "
             "transport:", "",
             "| layer | tokens a rank | forward, us | local | efficiency | x torchtitan's way "
             "| x transformers | step, us | local | efficiency | x torchtitan's way "
             "| x transformers |",
             "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for case in rows.cases:
        if not rows.us(case, "layer_fwd"):
            continue
        cells = [text for op in ("layer_fwd", "layer_step") for text in
                 (us(rows.us(case, op)), us(rows.us(case, op, "local")),
                  cell(rows.efficiency(case, op)),
                  *(cell(rows.faster(case, op, peer)) for peer in ("torchtitan", "transformers")))]
        lines.append(f"| {case[0]} | {case[1]} | {' | '.join(cells)} |")
    return lines


def ep_tables(r):
    made = files(r)
    return made and join(table for path, rows in made for table in (
        transport_table(r, path, rows), scheme_table(rows), layer_table(rows),
        open_goals(rows)))


def open_goals(rows):
    lines = summary(rows, rows.file["top_k"], only_open=True)
    return lines[:1] if len(lines) == 1 else [f"{lines[0][:-1]}; those that are open:", *lines[1:]]


def ep_headline(r):
    """A line of each machine that this was measured on."""
    lines = []
    for _, rows in files(r):
        cases = [case for case in rows.cases if case[1] == HEADLINE_TOKENS]
        found = {what: [value for case in cases if (value := measured(case)) is not None]
                 for what, measured in (
                     ("nccl", lambda case: rows.faster(case, "pair", "nccl")),
                     ("one", lambda case: rows.efficiency(case, "layer_step")),
                     ("titan", lambda case: rows.faster(case, "layer_step", "torchtitan")))}
        if not all(found.values()):
            continue
        nccl, one, titan = map(span, found.values())
        lines.append(
            f"- **Expert parallelism**, {rows.file['machine'].split(',')[0]}, {HEADLINE_TOKENS} "
            f"tokens a rank, {len(cases)} layers: tokens go to their experts and back {nccl} times "
            f"as fast as NCCL's own collectives move them; a training step is {titan} times as "
            f"fast as torchtitan's way, at {one} of one GPU's efficiency.")
    return lines


def support_row(r):
    """README's row of what runs today; None where nothing was measured: it stays as it is."""
    made = files(r)
    if not made:
        return None
    impls = {row["impl"] for _, rows in made for row in rows.all.values()}
    ways = ["memory of peers on one host"] if "peer" in impls else []
    machines = ", ".join(rows.file["machine"].split(",")[0] for _, rows in made)
    said = ", ".join([*ways, "NCCL", "callbacks"])
    return (f"{SUPPORT} MPI, PyTorch's process groups, callbacks "
            f"| {said}; measured on {machines} |")
