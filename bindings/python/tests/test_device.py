# SPDX-License-Identifier: Apache-2.0
"""The array API and every command with a --device, on memory of the device: CUDA with `-m gpu`,
where NumPy is all that is needed, and the same way through the CPU's memory without it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import moec
from conftest import DEVICES, E, H, I, K, T, assert_close, small_experts, small_router, tiny_shape
from moec import _errors, _tensors, cli, golden, golden_codes, shapes, synth
from moec.checkpoint import SafetensorsFile
from moec.cli import _common

README = Path(__file__).parents[1] / "README.md"
TOUR = Path(__file__).parents[3] / "docs/tour/python.md"
NUMBER = re.compile(r"-?\b[0-9][0-9.]*(e[-+]?[0-9]+)?")
GPU = pytest.mark.gpu


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A --device that takes copies alone, as a GPU does: calls refuse NumPy arrays."""
    from_numpy = _tensors._from_numpy

    def only_copies(raw: object, array: np.ndarray, name: str, write: bool) -> None:
        assert name in ("values", "out"), f"{name} is a NumPy array"  # of copy_from() and numpy()
        from_numpy(raw, array, name, write)

    monkeypatch.setattr(_tensors, "_from_numpy", only_copies)
    monkeypatch.setattr(moec.Context, "asarray", moec.Context.array)
    return str(request.param)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Folder of a small checkpoint in the current one; `moec bench` knows its shape as tiny."""
    shape = tiny_shape("qwen2_moe")
    known = shapes.load() | {"tiny": shape}
    monkeypatch.setattr(shapes, "load", lambda: known)
    monkeypatch.chdir(tmp_path)
    synth.write(synth.make(shape, dtype="f32", layer=3), Path("tiny"))
    return Path("tiny")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], env={"COLUMNS": "250"})


def run_on(device: str, *arguments: object) -> str:
    """What a command prints that has to succeed."""
    result = invoke(*arguments, "--device", device, "--threads", 2)
    assert result.exit_code == 0, f"{result.output}{result.exception!r}"
    return str(result.output)


def label_of(device: str) -> str:
    """What a command calls a device that it runs on with two threads."""
    with moec.Context(device) as context:
        return _common.describe_device(context, 2)


def words(printed: str, device: str) -> str:
    """The letters of what a command prints, without numbers, the device and what the clock is."""

    def letters(text: str) -> str:
        return re.sub("[^A-Za-z_]", "", NUMBER.sub("", text))

    label, lines = label_of(device), printed.splitlines()
    assert letters(label) in letters(printed)
    kept = "\n".join(line for line in lines if not line.startswith("ms of"))
    kept = re.sub(r", packed copy \S+ \w+", "", kept)  # a GPU reads plain weights where they are
    return letters(kept).replace(letters(label), "")


# ---- commands


def test_check(device: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    printed = run_on(device, "check", "--verbose", "--json", report)
    assert "54 passed, 0 failed" in printed
    errors = json.loads(report.read_text())
    assert len(errors) == 54 and all(
        error <= e["limits"].get(name, 2e-5) for e in errors for name, error in e["errors"].items())
    again = run_on("cpu", "check", "--verbose", "--json", report)
    assert words(printed, device) == words(again, "cpu")


def test_check_of_chosen_files(device: str, tmp_path: Path) -> None:
    for family in ("gpt_oss", "load_balancing_loss"):
        file = golden.default_folder() / f"{family}.safetensors"
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert "2 passed" in run_on(device, "check", "--golden", tmp_path)
    assert "1 passed" in run_on(device, "check", "--golden", tmp_path, "--family", "gpt_oss")


def test_check_fails_on_a_wrong_file(device: str, tmp_path: Path) -> None:
    source = golden.default_folder() / "olmoe.safetensors"
    data = bytearray(source.read_bytes())
    begin = SafetensorsFile(source)._entries["y"]["data_offsets"][0]
    at = 8 + int.from_bytes(data[:8], "little") + begin
    data[at : at + 4] = np.float32(3).tobytes()
    (tmp_path / "olmoe.safetensors").write_bytes(data)
    result = invoke("check", "--golden", tmp_path, "--device", device)
    assert result.exit_code == 1 and "0 passed, 1 failed" in result.output


@pytest.mark.parametrize("options", [
    ["--tokens", "9", "--grad", "--seed", "5"], ["--layer", "3", "--tokens", "1"],
    ["--tokens", "0"], ["--input", "x.npy", "--config", "config.json"],
], ids=" ".join)
def test_run(device: str, tiny: Path, options: list[str]) -> None:
    np.save(tiny / "x.npy", np.linspace(-1, 1, 3 * H, dtype=np.float32).reshape(3, H))
    options = [str(tiny / o) if "." in o else o for o in options]
    results = []
    for where in ("cpu", device):
        out = Path("out.safetensors")
        printed = run_on(where, "run", tiny, *options, "--out", out)
        file = SafetensorsFile(out)
        results.append((words(printed, where), {name: np.array(file[name]) for name in file}))
    (wanted_words, wanted), (got_words, got) = results
    assert got_words == wanted_words and list(got) == list(wanted)
    np.testing.assert_array_equal(got["expert_ids"], wanted["expert_ids"])
    for name in set(wanted) - {"expert_ids"}:
        assert_close(got[name], wanted[name])


# One of each way to read codes: streams, blocks, groups with an order, columns, one scale.
SCHEMES = ["nf4-nested", "mxfp4", "nvfp4", "fp8-block", "fp8-tensor", "int8-asym", "int4-asym",
           "int4-actorder", "awq", "gptq-actorder"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_run_of_codes(device: str, tmp_path: Path, scheme: str, dtype: str) -> None:
    assert invoke("synth", "--scheme", scheme, "--out", tmp_path).exit_code == 0
    results = []
    for where in ("cpu", device):
        out = tmp_path / "o.safetensors"
        printed = run_on(where, "run", tmp_path / "model.safetensors", "--tokens", 9, "--grad",
                         "--dtype", dtype, "--out", out)
        file = SafetensorsFile(out)
        results.append((words(printed, where), {name: np.array(file[name]) for name in file}))
    (wanted_words, wanted), (got_words, got) = results
    assert got_words == wanted_words and list(got) == list(wanted)
    np.testing.assert_array_equal(got["expert_ids"], wanted["expert_ids"])
    for name in set(wanted) - {"expert_ids"}:
        # A value that is stored in 16 bits may be the neighbour.
        f32 = 2e-5 if wanted[name].dtype == np.float32 else 1e-2
        rounded = golden_codes.limit_of(name, moec.DType.BF16, device != "cpu")
        assert_close(got[name], wanted[name], f32 if dtype == "f32" else rounded)


@pytest.mark.parametrize("mode", [["--naive"], ["--backward"]], ids=" ".join)
@pytest.mark.parametrize("scheme", ["nf4", "fp4-nested", "int4", "int8", "fp8-block"])
def test_bench_of_codes(device: str, tiny: Path, scheme: str, mode: list[str]) -> None:
    figures = tiny / "b.json"
    printed = run_on(device, "bench", "--model", "tiny", "--scheme", scheme, "--tokens", 7,
                     "--seconds", 0, "--json", figures, *mode)
    found = json.loads(figures.read_text())
    assert found["scheme"] == scheme and 4 <= found["weight_bits"] < 9.5
    assert f"{found['weight_bits']:.2f} bits each" in printed


def test_run_of_a_golden_file(device: str, tmp_path: Path) -> None:
    file = golden.default_folder() / "deepseek_v3.safetensors"
    printed = run_on(device, "run", file, "--grad", "--out", tmp_path / "o.safetensors")
    error = re.search(r"worst row against the y in deepseek_v3.safetensors: (\S+)", printed)
    assert error and float(error[1]) <= golden.TOLERANCE


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("mode", [["--naive"], ["--backward"], []], ids=" ".join)
def test_bench(device: str, tiny: Path, mode: list[str], dtype: str) -> None:
    figures = tiny / "b.json"
    options = ["--model", "tiny", "--dtype", dtype, "--tokens", 1, "--tokens", 7, "--seconds", 0,
               "--json", figures, *mode]
    printed = run_on(device, "bench", *options)
    found = json.loads(figures.read_text())
    with moec.Context(device) as context:
        assert found["device"] == context.name and found["chip"] == context.device.name
    clocks = {t["engine"]: t["clock"] for t in found["timings"]}
    assert ("CUDA events" in clocks["moec"]) == device.startswith("cuda")
    assert "wall clock" in clocks.get("NumPy loop", "wall clock")
    assert all(f"ms of {engine}: {clock}" in printed for engine, clock in clocks.items())
    assert len(found["timings"]) == (4 if mode == ["--naive"] else 2)
    assert all(0 < t["seconds"] < 1 and t["gflops"] > 0 for t in found["timings"])
    assert words(printed, device) == words(run_on("cpu", "bench", *options), "cpu")


def test_bench_draws(device: str, tiny: Path) -> None:
    pytest.importorskip("matplotlib")
    run_on(device, "bench", "--model", "tiny", "--tokens", 2, "--seconds", 0,
           "--plot", tiny / "b.png")
    assert (tiny / "b.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["check", "run", "bench"])
def test_a_device_that_is_absent(command: str, tiny: Path) -> None:
    more = {"run": [tiny], "bench": ["--model", "tiny"]}.get(command, [])
    result = invoke(command, *more, "--device", "cuda:999")
    assert isinstance(result.exception, moec.DeviceError)


# ---- the array API


def test_the_readme_on_a_device(
    device: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program with the lines of the tour's "A GPU" in place of those that begin alike."""
    program_text, _ = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    program = program_text.splitlines()
    changed = re.findall(r"^    (.*)$", TOUR.read_text().partition("## A GPU")[2], re.M)
    assert len(changed) == 4
    for line in changed:
        begin = re.match(r"[^=(]+[=(]", line)
        assert begin
        at = [i for i, old in enumerate(program) if old.startswith(begin[0])]
        assert len(at) == 1, line
        program[at[0]] = line.replace('"cuda"', f'"{device}"')
    names: dict[str, object] = {}
    exec(compile("\n".join(program), str(README), "exec"), names)
    printed = capsys.readouterr().out
    y = np.asarray(names["out"].y)  # type: ignore[attr-defined]
    assert printed.strip() == str(y) and np.isfinite(y).all()
    monkeypatch.undo()
    exec(compile(program_text, str(README), "exec"), names)
    assert_close(y, names["out"].y)  # type: ignore[attr-defined]


def test_asarray_copies_what_is_elsewhere(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with moec.Context(device) as context:
        placed = context.asarray(x)
        assert (placed is x) == (device == "cpu")
        np.testing.assert_array_equal(np.asarray(placed), x)
        array = context.array(x.T)  # any strides
        np.testing.assert_array_equal(array, x.T)
        assert context.asarray(array) is array
        assert np.asarray(array, np.float64).dtype == np.float64
        assert repr(array) == f"<moec.DeviceArray [3, 2] float32 on {context.name}>"
        with pytest.raises(ValueError, match="without a copy"):
            array.__array__(copy=False)


@GPU
def test_memory_goes_back() -> None:
    """With the last reference: in all twice what the device has is allocated, a part at a time."""
    with moec.Context("cuda") as context:
        part = context.device.total_bytes // 16
        for _ in range(32):
            context.empty((part,), "u8")
        array = context.zeros((3,))
    array.close()  # after its context


@GPU
def test_numpy_arrays_are_refused() -> None:
    """Each call names the argument, both devices and the way there."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    host = SimpleNamespace(x=normal(T, H), gate=normal(E, H), logits=normal(T, E))
    arrays = {"gate_up": normal(E, 2 * I, H), "down": normal(E, H, I)}
    with moec.Context("cuda") as context:
        layer = moec.Layer(context, small_router(), small_experts())
        router = moec.Router(context, small_router())
        weights = moec.Weights.of(context, **{n: context.array(a) for n, a in arrays.items()})
        plan = moec.Plan(context, moec.PlanDesc(max_tokens=T, num_experts=E, top_k=K))
        ids = np.zeros((T, K), np.int32)
        plan.from_topk(context.array(ids))
        experts = moec.Experts(context, small_experts())
        gate = context.array(host.gate)
        loss = moec.Loss(kind=moec.LossKind.Z)
        calls = {
            "gate_up": lambda: moec.Weights.of(context, **arrays),
            "x": lambda: layer.forward(host.x, weights, gate),
            "gate weight": lambda: layer.forward(context.array(host.x), weights, host.gate),
            "weight": lambda: router.gate(context.array(host.x), host.gate),
            "logits": lambda: router.route(host.logits),
            "expert_ids": lambda: plan.from_topk(ids),
            "x ": lambda: experts.forward(plan, host.x, weights),
            "x  ": lambda: moec.permute(context, plan, host.x),
            "rows": lambda: moec.unpermute(context, plan, normal(plan.num_rows, H),
                                           num_tokens=T),
            "logits ": lambda: loss(context, host.logits),
        }
        for name, call in calls.items():
            text = rf"{re.escape(name.strip())}.* is on cpu; expected cuda:0; moec.Context.array "
            with pytest.raises(moec.DeviceError, match=text):
                call()


def test_the_hint_is_for_numpy_arrays_alone() -> None:
    hint = "; moec.Context.array copies a NumPy array there"
    for message, more in (("x is on cpu; expected cuda:1", hint),
                          ("x is on cuda:0; expected cuda:1", ""), ("cuda:0 failed", "")):
        made = _errors.error_of(moec._raw.MOEC_E_DEVICE, 0, 0, "MOEC_E_DEVICE", "f", message)
        assert str(made) == message + more
