# SPDX-License-Identifier: Apache-2.0
"""README's plot as SVG: training step and forward of the seven layers beside SonicMoE and the
cuBLAS bound in TFLOP/s of real rows, and what moec wins over grouped_mm."""

from gpu.layers import LAYERS
from report_tables import LONG

WIDTH, HEIGHT = 960, 525
COLOURS = {"moec": "#1f6feb", "SonicMoE": "#9aa5b1", "cuBLAS bound": "#d5dae0"}
INK, FAINT = "#24292f", "#d0d7de"
MOST = 800  # TFLOP/s at the top of an axis


def text(x, y, words, size=12, anchor="middle", weight="normal"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
            f'font-weight="{weight}" fill="{INK}">{words}</text>')


def box(x, y, width, height, colour):
    return (f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{colour}"/>')


def line(x1, y1, x2, y2, colour, width=1):
    return (f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
            f'stroke-width="{width}"/>')


def bars_of(rows, shape, mode):
    """[(name, TFLOP/s)]; a peer's from the call in which it took turns with moec."""
    speed = rows.best(shape, LONG, mode)["tflops"]
    bars = [("moec", speed)]
    for name, impl in ("SonicMoE", "sonicmoe"), ("cuBLAS bound", "cublas_bmm_bound"):
        ratio = rows.times_as_fast(shape, LONG, mode, impl)
        if ratio:
            bars.append((name, speed / ratio))
    return bars


def speeds(rows, mode, title, left, top, width, height):
    """A group of bars for each layer; above moec's how many times as fast as SonicMoE's it is."""
    yield text(left, top - 28, title, 15, "start", "bold")
    for value in range(0, MOST + 1, 200):
        y = top + height * (1 - value / MOST)
        yield line(left, y, left + width, y, FAINT)
        yield text(left - 6, y + 4, value, 11, "end")
    yield text(left - 6, top - 10, "TFLOP/s", 11, "end")
    group = width / len(LAYERS)
    for index, shape in enumerate(LAYERS):
        bars = bars_of(rows, shape, mode)
        bar = group * 0.78 / len(bars)
        x = left + group * index + group * 0.11
        for name, value in bars:
            tall = height * value / MOST
            yield box(x, top + height - tall, bar - 1, tall, COLOURS[name])
            x += bar
        highest = max(value for _, value in bars)
        ratio = rows.times_as_fast(shape, LONG, mode, "sonicmoe")
        middle = left + group * (index + 0.5)
        if ratio:
            yield text(middle, top + height * (1 - highest / MOST) - 5, f"{ratio:.2f} x", 11,
                       weight="bold")
        yield text(middle, top + height + 16 + 14 * (index % 2), shape, 11)


def beside_grouped_mm(results, left, top, width):
    """A bar for each setting: how many times as fast as grouped_mm."""
    model, layer = results.models("h200/transformers.json"), results.torch_cpu()
    bars = (("Qwen3-MoE, H200: training step", model["step"]),
            ("Qwen3-MoE, H200: prefill", model["prefill"]),
            ("Qwen3-30B layer, 2 CPU cores: training step", layer["fwdbwd"]["x_torch"]),
            ("Qwen3-30B layer, 2 CPU cores: forward", layer["fwd"]["x_torch"]))
    yield text(left, top, "times as fast as grouped_mm", 15, "start", "bold")
    label, y = 300, top + 14
    scale = (width - label - 60) / max(value for _, value in bars)
    for name, value in bars:
        yield text(left + label - 8, y + 13, name, 12, "end")
        yield box(left + label, y, scale * value, 17, COLOURS["moec"])
        yield text(left + label + scale * value + 6, y + 13, f"{value:.2f} x", 11, "start", "bold")
        y += 23
    x = left + label + scale
    yield line(x, top + 10, x, y, INK, 1.5)
    yield text(x, y + 14, "grouped_mm", 11)


def legend(left, y):
    for name, colour in COLOURS.items():
        yield box(left, y - 10, 12, 12, colour)
        yield text(left + 17, y, name, 12, "start")
        left += 30 + 7.5 * len(name)


def svg(results):
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="Helvetica, Arial, sans-serif">',
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "<!-- made by bench/report.py -->",
        box(0, 0, WIDTH, HEIGHT, "#ffffff"),
        text(50, 26, f"H200, bf16, {LONG} tokens; above the bars: times as fast as SonicMoE", 13,
             "start"),
        *legend(640, 26),
        *speeds(results.gpu, "fwdbwd", "training step", 50, 90, 410, 240),
        *speeds(results.gpu, "fwd", "forward", 530, 90, 410, 240),
        *beside_grouped_mm(results, 50, 395, 890),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
