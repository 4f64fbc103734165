# SPDX-License-Identifier: Apache-2.0
"""README's tables of speeds, made from bench/results and never typed.

    python bench/readme_table.py           rewrite it
    python bench/readme_table.py --check   fail if README.md says something else
"""

import json
import pathlib
import sys

from gpu_rows import Rows

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench/results"
BEGIN, END = "<!-- bench: made by bench/readme_table.py -->", "<!-- /bench -->"
TOKENS = {"T1", "T512", "T2048"}  # the rest is in the files


def rows(result):
    """(shape/dtype/T, case, case of the oneDNN loop or None)"""
    for layer in result["layers"]:
        cases = {case["case"]: case for case in layer["cases"]}
        for name, case in cases.items():
            if name.split("/")[-1] in TOKENS:
                yield name, case, cases.get(f"{name}/onednn_loop")


def three(value):
    """With three significant digits, zeros among them."""
    return f"{value:#.3g}".rstrip(".")


def best(result, *names):
    """The highest of these limits over the whole run: the least flattering one."""
    return max(layer["limits"][name] for layer in result["layers"] for name in names)


def table(path):
    result = json.loads(path.read_text())
    lines = [
        f"{result['machine']}; weights cold, medians of {result['rounds']} rounds, "
        f"[{path.relative_to(ROOT)}]({path.relative_to(ROOT)}):",
        "",
        "| layer | tokens | ms | GFLOP/s | weights GB/s | of the read limit | of the matrix peak "
        "| oneDNN loop |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    order = sorted(rows(result), key=lambda row: (row[0].split("/T")[0], row[1]["gflops"]))
    for name, case, peer in order:
        shape, dtype, tokens = name.split("/")
        units = ["fma_f32_gflops"] + ["dot_bf16_gflops", "amx_bf16_gflops"] * (dtype == "bf16")
        ratio = f"{peer['ms'] / case['ms']:.2f} x the time" if peer else "not run"
        lines.append(
            f"| {shape} {dtype} | {tokens[1:]} | {three(case['ms'])} | {case['gflops']:.0f} "
            f"| {case['weight_gbps']:.1f} | {case['weight_gbps'] / best(result, 'read_gbps'):.2f} "
            f"| {case['gflops'] / best(result, *units):.2f} | {ratio} |"
        )
    return lines


def threads_line(path):
    """What one thread more brings, and a layer that is all overhead."""
    result = json.loads(path.read_text())
    ms = {case["case"]: case["ms"] for layer in result["layers"] for case in layer["cases"]}
    one, more = sorted({int(name.split("/threads")[1]) for name in ms if "/threads" in name})

    def of(name, threads):
        return ms[f"{name}/threads{threads}"]

    names = sorted({name.rsplit("/threads")[0] for name in ms if "/T512/threads" in name})
    gains = ", ".join(f"{name.split('/')[0]} {of(name, one) / of(name, more):.2f} x"
                      for name in names if not name.startswith("overhead"))
    empty = "overhead/bf16/T1"
    return [
        f"{result['machine']}: a layer that is all overhead (128 experts, top-8, H = I = 32, one "
        f"token) takes {1e3 * of(empty, more):.1f} us on {more} threads, "
        f"{1e3 * of(empty, one):.1f} us on one. {more} threads beside one at 512 tokens: {gains} "
        f"([{path.relative_to(ROOT)}]({path.relative_to(ROOT)}))."
    ]


def ratio(value, digits=2):
    return "-" if value is None else f"{value:.{digits}f}"


def gpu_table(path):
    rows = Rows(path)
    name = path.relative_to(ROOT)
    lines = [
        f"{rows.file['machine']}; plan, experts and combine from top-k ids, bf16, cold L2; "
        f"[{name}]({name}) says of which commit each row is and how long it was measured:",
        "",
        "| layer | tokens | forward ms | x floor | x cuBLAS bound | x SonicMoE's time "
        "| step ms | TFLOP/s | x SonicMoE's time | saved MiB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for shape in rows.shapes:
        for tokens in sorted({row["tokens"] for row in rows.all if row["shape"] == shape}):
            row, step = (rows.best(shape, tokens, mode) for mode in ("fwd", "fwdbwd"))
            if not row:
                continue
            bound, peer = (rows.over(shape, tokens, "fwd", other)
                           for other in ("cublas_bmm_bound", "sonicmoe"))
            lines.append(
                f"| {shape} | {tokens} | {three(row['ms'])} | {row['ms'] / row['floor_ms']:.2f} "
                f"| {ratio(bound)} | {ratio(peer)} "
                f"| {ratio(step and step['ms'])} | {ratio(step and step['tflops'], 0)} "
                f"| {ratio(rows.over(shape, tokens, 'fwdbwd', 'sonicmoe'))} "
                f"| {ratio(step and step['saved_mib'], 0)} |"
            )
    return lines


def models_table(paths):
    """Hugging Face models on moec, beside transformers' default."""
    cases = ("prefill", "step", "decode", "generate")
    lines = [
        'A Hugging Face Qwen3-MoE with `experts_implementation="moec"`, random weights, bf16: ms, '
        "and how many times as fast as with transformers' default `grouped_mm`; whole models:",
        "",
        "| model | on | prefill | training step | a token, eager | in compiled `generate` |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for path in paths:
        file = json.loads(path.read_text())
        settings = {}
        for row in file["rows"]:
            key = row["layers"], row["shape"], row["tokens"], row["device"], row["threads"]
            if row["experts"] == "moec":
                settings.setdefault(key, {})[row["case"]] = row
        for (layers, shape, tokens, device, threads), found in settings.items():
            on = file["machine"]["gpu"] or f"{threads} cores, {file['machine']['isa']}"
            cells = (f"{three(row['ms'])}, {row['x_grouped_mm']:.2f} x" if row else "-"
                     for row in map(found.get, cases))
            lines.append(f"| {layers} layers of {shape}, {tokens} tokens | "
                         f"[{on}]({path.relative_to(ROOT)}) | {' | '.join(cells)} |")
    return lines


def main():
    readme = ROOT / "README.md"
    text = readme.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    files = sorted(RESULTS.glob("*/layer.json")) + sorted(RESULTS.glob("*/layer_f32.json"))
    made = [(gpu_table if "rows" in json.loads(path.read_text()) else table)(path)
            for path in files]
    made += [threads_line(path) for path in sorted(RESULTS.glob("*/threads.json"))]
    made.append(models_table(sorted(RESULTS.glob("*/transformers.json"))))
    body = "\n\n".join("\n".join(lines) for lines in made)
    wanted = f"{head}{BEGIN}\n\n{body}\n\n{END}{tail}"
    if "--check" in sys.argv[1:]:
        sys.exit(wanted != text and "README.md: its table is not what bench/readme_table.py makes")
    readme.write_text(wanted)


if __name__ == "__main__":
    main()
