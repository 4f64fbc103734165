# SPDX-License-Identifier: Apache-2.0
"""The tables and sentences that report.py puts into pages: each function makes lines of Markdown
from files of bench/results. "x NAME" is how many times as fast as NAME: above 1 is faster."""

import json
import os

import quantised_goals as goals
from gpu.layers import LAYERS
from gpu_rows import Rows

LONG, LONGER = 4096, 16384  # tokens of the training rows
CPU_TOKENS = {"T1", "T512", "T2048"}  # the rest is in the files


def three(value):
    """With three significant digits, zeros among them."""
    return f"{value:#.3g}".rstrip(".")


def cell(value, digits=2):
    return "-" if value is None else f"{value:.{digits}f}"


def span(values, digits=2):
    """The smallest and the largest: `1.07 to 1.42`."""
    low, high = (f"{end:.{digits}f}" for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def link(page, path):
    """A file's name and its place, for a page in the folder `page`."""
    place = os.path.relpath(path, page)
    return f"[{place}]({place})"


class Results:
    """The committed files, and the folder of the page that names them."""

    def __init__(self, root, page):
        self.page, self.results = root / page, root / "bench/results"
        self.gpu_file = self.results / "h200/layer.json"
        self.gpu = Rows(self.gpu_file)

    def link(self, path):
        return link(self.page, path)

    def read(self, name):
        return json.loads((self.results / name).read_text())

    def faster(self, mode, tokens, other):
        """Of the seven layers, those that took turns with `other`."""
        found = (self.gpu.times_as_fast(shape, tokens, mode, other) for shape in LAYERS)
        return [value for value in found if value]

    def models(self, name, **wanted):
        """{case: times as fast as grouped_mm} of a transformers.json."""
        return {row["case"]: row["x_grouped_mm"] for row in self.read(name)["rows"]
                if row["experts"] == "moec" and wanted.items() <= row.items()}

    def torch_cpu(self):
        """{mode: moec's row} of the layer beside PyTorch's grouped_mm."""
        return {row["mode"]: row for row in self.read("xeon-amx/peers.json")["rows"]
                if row["impl"] == "moec"}


def headline(r):
    """What README says before anything else."""
    step, forward = (r.faster(mode, LONG, "sonicmoe") for mode in ("fwdbwd", "fwd"))
    bounds = [[100 * value for value in r.faster("fwd", tokens, "cublas_bmm_bound")]
              for tokens in (LONG, LONGER)]
    model, layer = r.models("h200/transformers.json"), r.torch_cpu()
    cpu = r.read("xeon-amx/layer.json")
    share = [case["weight_gbps"] / best(cpu, "read_gbps") for entry in cpu["layers"]
             for case in entry["cases"] if case["case"].endswith("/T1")]
    read = span([100 * value for value in share], 0)
    return [
        f"- **H200**, bf16, {LONG} tokens, {len(step)} layers: a training step is {span(step)} "
        f"times as fast as SonicMoE's, a forward {span(forward)} times.",
        f"- A forward there reaches {span(bounds[0], 0)} % of the speed of its bare products in "
        f"cuBLAS, and {span(bounds[1], 0)} % at {LONGER} tokens.",
        f"- **Hugging Face**: a Qwen3-MoE on an H200 trains {model['step']:.2f} times as fast as "
        f"with transformers' default `grouped_mm`, and reads a prompt {model['prefill']:.2f} times "
        f"as fast.",
        f"- **CPU**, two cores with AMX, a Qwen3-30B layer: a training step is "
        f"{layer['fwdbwd']['x_torch']:.2f} times as fast as PyTorch's `grouped_mm`, a forward "
        f"{layer['fwd']['x_torch']:.2f} times. For one token, {read} % of the memory's read speed "
        f"goes into weights.",
        *coded(r),
        *qlora(r),
    ]


def coded(r):
    """A line on frozen quantised experts."""
    rows = goals.Coded(r.results / "h200/quantised.json")

    def of(value, tokens, mode, names):
        found = [value(rows, shape, tokens, mode, name)
                 for shape in goals.SHAPES for name in names]
        return [ratio for ratio in found if ratio]

    def faster(tokens, mode):
        names = goals.FOUR + goals.EIGHT
        return span([1 / ratio for ratio in of(goals.Coded.over_bf16, tokens, mode, names)])

    line = ("- **Quantised experts**, frozen, of 4 and 8 bits on an H200, beside the same values "
            f"in bf16: a forward of 64 tokens is {faster(64, 'fwd')} times as fast, of {LONG} "
            f"tokens {faster(LONG, 'fwd')} times, a step of {LONG} tokens {faster(LONG, 'step')} "
            "times.")
    peers = [(f"NF4's forward of {LONG} tokens is {{}} times as fast as bitsandbytes' stacks in "
              "`grouped_mm`", goals.stack, "fwd", "nf4"),
             ("a step {} times", goals.rebuilt, "step", "nf4"),
             ("MXFP4's forward {} times as fast as triton_kernels'", goals.triton, "fwd", "mxfp4")]
    beside = [(text, of(value, LONG, mode, [name])) for text, value, mode, name in peers]
    said = ", ".join(text.format(span(found)) for text, found in beside if found)
    return [f"{line} {said}." if said else line]


def qlora(r):
    """A line a model that QLoRA's steps were measured on."""
    lines, made = [], r.read("h200/qlora_models.json")
    rows = {(row["model"], row["impl"]): row for row in made["rows"]}
    for model in dict.fromkeys(model for model, _ in rows):
        ours = rows.get((model, "moec"))
        peers = [(name, rows[model, way]) for name, way in
                 (("dense", "dense"), ("NF4", "nf4")) if (model, way) in rows]
        if not ours or not peers:
            continue
        times = ", ".join(f"{ours['beside'][peer['impl']] / ours['ms']:.2f} times as fast as "
                          f"{name} experts with PEFT" for name, peer in peers)
        memory = " and ".join(f"{peer['peak_mib'] / 1024:.1f}" for _, peer in peers)
        gpu = made["machine"].split(",")[0].split()[1]
        lines.append(
            f"- **QLoRA** of four layers of {model} on an {gpu}: a step of adapters on NF4 "
            f"experts is {times}. Its memory peaks at {ours['peak_mib'] / 1024:.1f} GiB, "
            f"theirs at {memory}.")
    return lines


def seven_layers(r):
    """README's table."""
    lines = [
        "| layer | experts, top-k, H x I | forward, ms | x SonicMoE | x bound | step, ms | "
        "TFLOP/s | x SonicMoE |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, shape in LAYERS.items():
        row, step = (r.gpu.best(name, LONG, mode) for mode in ("fwd", "fwdbwd"))
        forward, bound, trained = (
            cell(r.gpu.times_as_fast(name, LONG, mode, other)) for mode, other in
            (("fwd", "sonicmoe"), ("fwd", "cublas_bmm_bound"), ("fwdbwd", "sonicmoe")))
        lines.append(
            f"| {name} | {shape.experts}, {shape.top_k}, {shape.hidden} x {shape.inter} "
            f"| {three(row['ms'])} | {forward} | {bound} | {three(step['ms'])} "
            f"| {step['tflops']:.0f} | {trained} |")
    return lines


def gpu_table(r, path):
    rows = Rows(path)
    lines = [
        f"{rows.file['machine']}; {r.link(path)} says of which commit each row is and how long it "
        "was measured:",
        "",
        "| layer | tokens | forward, ms | x floor | x bound | x SonicMoE | step, ms | TFLOP/s "
        "| x SonicMoE | saved, MiB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for shape in LAYERS:
        for tokens in sorted({row["tokens"] for row in rows.all if row["shape"] == shape}):
            row, step = (rows.best(shape, tokens, mode) for mode in ("fwd", "fwdbwd"))
            if not row:
                continue
            bound, peer = (rows.times_as_fast(shape, tokens, "fwd", other)
                           for other in ("cublas_bmm_bound", "sonicmoe"))
            lines.append(
                f"| {shape} | {tokens} | {three(row['ms'])} | {row['floor_ms'] / row['ms']:.2f} "
                f"| {cell(bound)} | {cell(peer)} "
                f"| {three(step['ms']) if step else '-'} | {cell(step and step['tflops'], 0)} "
                f"| {cell(rows.times_as_fast(shape, tokens, 'fwdbwd', 'sonicmoe'))} "
                f"| {cell(step and step['saved_mib'], 0)} |"
            )
    return lines


def cpu_rows(result):
    """(shape/dtype/T, case, case of the oneDNN loop or None)"""
    for layer in result["layers"]:
        cases = {case["case"]: case for case in layer["cases"]}
        for name, case in cases.items():
            if name.split("/")[-1] in CPU_TOKENS:
                yield name, case, cases.get(f"{name}/onednn_loop")


def best(result, *names):
    """The highest of these limits over the whole run: the least flattering one."""
    return max(layer["limits"][name] for layer in result["layers"] for name in names)


def cpu_table(r, path):
    result = json.loads(path.read_text())
    lines = [
        f"{result['machine']}; medians of {result['rounds']} rounds, {r.link(path)}:",
        "",
        "| layer | tokens | ms | GFLOP/s | weights, GB/s | x read limit | x matrix peak "
        "| x oneDNN loop |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    order = sorted(cpu_rows(result), key=lambda row: (row[0].split("/T")[0], row[1]["gflops"]))
    for name, case, peer in order:
        shape, dtype, tokens = name.split("/")
        units = ["fma_f32_gflops"] + ["dot_bf16_gflops", "amx_bf16_gflops"] * (dtype == "bf16")
        lines.append(
            f"| {shape} {dtype} | {tokens[1:]} | {three(case['ms'])} | {case['gflops']:.0f} "
            f"| {case['weight_gbps']:.1f} | {case['weight_gbps'] / best(result, 'read_gbps'):.2f} "
            f"| {case['gflops'] / best(result, *units):.2f} "
            f"| {cell(peer and peer['ms'] / case['ms'])} |"
        )
    return lines


def threads_line(r, path):
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
        f"({r.link(path)})."
    ]


def torch_table(r, path):
    """The experts beside PyTorch's grouped_mm on a CPU."""
    file = json.loads(path.read_text())
    names = {"fwd": "forward", "fwdbwd": "training step"}
    lines = [
        f"{file['machine']['cpu']}, torch {file['machine']['torch']}, {r.link(path)}:",
        "",
        "| layer | tokens | what | ms | GFLOP/s | x grouped_mm | spread |",
        "|---|--:|---|--:|--:|--:|--:|",
    ]
    for row in file["rows"]:
        if row["impl"] == "moec":
            lines.append(
                f"| {row['shape']} {row['dtype']} | {row['tokens']} | {names[row['mode']]} "
                f"| {three(row['ms'])} | {row['gflops']:.0f} | {row['x_torch']:.2f} "
                f"| {row['spread']:.2f} |")
    return lines


def models_table(r, paths):
    """Hugging Face models on moec, beside transformers' default."""
    cases = ("prefill", "step", "decode", "generate")
    lines = [
        'A Hugging Face Qwen3-MoE with `experts_implementation="moec"`, random weights, bf16: ms, '
        "and x grouped_mm, which is transformers' default. Whole models:",
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
            cells = (f"{three(row['ms'])}, {row['x_grouped_mm']:.2f}" if row else "-"
                     for row in map(found.get, cases))
            place = os.path.relpath(path, r.page)
            lines.append(f"| {layers} layers of {shape}, {tokens} tokens | [{on}]({place}) "
                         f"| {' | '.join(cells)} |")
    return lines


def gpu_tables(r):
    paths = [path for path in sorted(r.results.glob("*/layer.json"))
             if "rows" in json.loads(path.read_text())]
    return join(gpu_table(r, path) for path in paths)


def cpu_tables(r):
    paths = sorted(r.results.glob("*/layer.json")) + sorted(r.results.glob("*/layer_f32.json"))
    made = [cpu_table(r, path) for path in paths if "layers" in json.loads(path.read_text())]
    made += [threads_line(r, path) for path in sorted(r.results.glob("*/threads.json"))]
    made += [torch_table(r, path) for path in sorted(r.results.glob("*/peers.json"))]
    return join(made)


def case_name(case):
    shape, tokens, mode = case
    return f"{shape} | {tokens} | {'forward' if mode == 'fwd' else 'step'}"


def codes_table(r, path):
    """Frozen quantised experts beside the same values in bf16."""
    file = json.loads(path.read_text())
    found = {(row["shape"], row["tokens"], row["mode"], row["impl"]): row for row in file["rows"]}
    impls = {key[3] for key in found}
    names = {name: title for name, title in goals.NAMES.items() if f"moec-{name}" in impls}
    lines = [f"Frozen quantised experts, times as fast as the same values in bf16. "
             f"{file['machine']}, {r.link(path)}:", "",
             f"| layer | tokens | | {' | '.join(names.values())} |",
             f"|---|--:|---|{'--:|' * len(names)}"]
    for case in dict.fromkeys(key[:3] for key in found):
        rows = (found.get((*case, f"moec-{name}")) for name in names)
        lines.append(f"| {case_name(case)} "
                     f"| {' | '.join(cell(row and 1 / row['over_bf16']) for row in rows)} |")
    return lines


def adapters_table(r, path):
    """Adapters beside none, and beside torch's two ways to have them."""
    file = json.loads(path.read_text())
    found = {(row["shape"], row["tokens"], row["mode"], row["impl"]): row for row in file["rows"]}
    lines = [f"Adapters of rank {file['rank']} on every matrix: the time beside that without them, "
             "and times as fast as torch's products with factors (x factored) and with "
             f"`W + s B A` (x delta) on bf16. {file['machine']}, {r.link(path)}:", "",
             "| layer | tokens | | bf16 | NF4 | x factored | x delta |",
             "|---|--:|---|--:|--:|--:|--:|"]
    for case in dict.fromkeys(key[:3] for key in found):
        row = lambda impl: found.get((*case, impl))  # noqa: E731
        ours = row("moec-bf16-lora")
        cost = (cell(adapted and adapted["over_base"]) for adapted in (ours, row("moec-nf4-lora")))
        faster = (cell(peer and peer["ms"] / ours["ms"]) for peer in
                  (row("torch-factored"), row("torch-delta")))
        lines.append(f"| {case_name(case)} | {' | '.join([*cost, *faster])} |")
    return lines


def codes_tables(r):
    made = [codes_table(r, path) for path in sorted(r.results.glob("*/quantised.json"))]
    made += [adapters_table(r, path) for path in sorted(r.results.glob("*/lora.json"))]
    return join(made)


def model_tables(r):
    return models_table(r, sorted(r.results.glob("*/transformers.json")))


def join(tables):
    """Lines of all, an empty line between two."""
    return "\n\n".join("\n".join(lines) for lines in tables).split("\n")
