# SPDX-License-Identifier: Apache-2.0
"""The moec command, in process and as an installed program."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import moec
from conftest import tiny_shape
from moec import checkpoint, cli, golden, shapes, synth
from moec.checkpoint import CheckpointError, SafetensorsFile
from moec.cli import _common, bench
from moec.families import BY_MODEL_TYPE
from moec.synth_codes import SCHEMES

COMMANDS = ("info", "path", "run", "synth", "check", "bench", "epsim")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], env={"COLUMNS": "200"})


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model small enough to synthesise and time here."""
    known = shapes.load() | {"tiny": tiny_shape("qwen3_moe")}
    monkeypatch.setattr(shapes, "load", lambda: known)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0 and f"Example: moec {command}" in result.output


def test_a_long_name_cuts_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    made = _common.table("devices", "name", "memory", "free")
    made.add_row("a processor with a name of a whole line " * 3, "1234.5 GB", "123.4 GB")
    Console(width=60).print(made)
    said = capsys.readouterr().out
    assert "1234.5 GB" in said and "123.4 GB" in said


def test_info() -> None:
    result = invoke("info")
    assert result.exit_code == 0 and moec.version() in result.output
    assert "qwen3-30b" in result.output
    about = json.loads(invoke("info", "--json").output)
    assert about["devices"][0]["backend"] == "cpu"
    assert about["cuda"]["devices"] == sum(d["backend"] == "cuda" for d in about["devices"])
    assert about["cuda"]["state"] in result.output


def test_check_without_the_golden_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "moec_golden", None)
    wrong = invoke("check")
    assert isinstance(wrong.exception, CheckpointError)
    assert "install moec-golden" in str(wrong.exception) and "--golden" in str(wrong.exception)


def test_check(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    result = invoke("check", "--json", report)
    assert result.exit_code == 0, result.output
    assert "54 passed, 0 failed" in result.output
    errors = json.loads(report.read_text())
    limits = [{name: e["limits"].get(name, 2e-5) for name in e["errors"]} for e in errors]
    assert len(errors) == 54 and sum(e["kind"] != "" for e in errors) == 19
    assert all(error <= limit[name] for e, limit in zip(errors, limits, strict=True)
               for name, error in e["errors"].items())


def test_check_fails_on_a_wrong_file(tmp_path: Path) -> None:
    source = golden.default_folder() / "olmoe.safetensors"
    data = bytearray(source.read_bytes())
    entry = SafetensorsFile(source)._entries["y"]["data_offsets"][0]
    at = 8 + int.from_bytes(data[:8], "little") + entry
    data[at : at + 4] = np.float32(3).tobytes()
    (tmp_path / "olmoe.safetensors").write_bytes(data)
    result = invoke("check", "--golden", tmp_path)
    assert result.exit_code == 1 and "0 passed, 1 failed" in result.output


def test_check_of_one_family() -> None:
    result = invoke("check", "--family", "gpt_oss", "--verbose")
    assert result.exit_code == 0 and "experts.gate_up_proj_bias" in result.output
    wrong = invoke("check", "--family", "gpt_os")
    assert wrong.exit_code == 2 and "did you mean gpt_oss" in wrong.output


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("shards", [1, 3])
def test_synth_and_run(tmp_path: Path, shards: int) -> None:
    made = invoke("synth", "--model", "tiny", "--out", tmp_path / "m", "--shards", shards)
    assert made.exit_code == 0, made.output
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == shards
    out = tmp_path / "out.safetensors"
    result = invoke("run", tmp_path / "m", "--tokens", 5, "--grad", "--out", out)
    assert result.exit_code == 0, result.output
    file = SafetensorsFile(out)
    assert file["y"].shape == (5, 32) and file["expert_ids"].shape == (5, 2)
    assert file["grad.model.layers.0.mlp.experts.7.down_proj.weight"].shape == (32, 24)
    assert np.isfinite(file["grad.x"].astype(np.float32)).all()


@pytest.mark.usefixtures("tiny")
def test_run_reads_an_input(tmp_path: Path) -> None:
    invoke("synth", "--model", "tiny", "--out", tmp_path, "--dtype", "f32")
    x = np.linspace(-1, 1, 3 * 32, dtype=np.float32).reshape(3, 32)
    np.save(tmp_path / "x.npy", x)
    out = tmp_path / "o.safetensors"
    result = invoke("run", tmp_path, "--input", tmp_path / "x.npy", "--out", out)
    assert result.exit_code == 0, result.output
    np.testing.assert_array_equal(SafetensorsFile(out)["x"], x)
    np.save(tmp_path / "wrong.npy", x[:, :31])
    wrong = invoke("run", tmp_path, "--input", tmp_path / "wrong.npy", "--out", out)
    assert wrong.exit_code != 0 and "[T,32] is needed" in str(wrong.exception)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("shards", [1, 2])
def test_run_in_the_checkpoints_folder(tmp_path: Path, shards: int) -> None:
    """Outputs are no part of the checkpoint, and the checkpoint is no output."""
    invoke("synth", "--model", "tiny", "--out", tmp_path, "--dtype", "f32", "--shards", shards)
    seen = []
    for tokens, name in ((4, "a"), (9, "a"), (9, "b")):
        out = tmp_path / f"{name}.safetensors"
        result = invoke("run", tmp_path, "--tokens", tokens, "--grad", "--out", out)
        assert result.exit_code == 0 and "against the y" not in result.output, result.output
        seen.append(np.array(SafetensorsFile(out)["y"]))
    assert seen[1].shape == (9, 32)
    np.testing.assert_array_equal(seen[1], seen[2])
    part = next(tmp_path.glob("model*.safetensors"))
    size = part.stat().st_size
    for source in (tmp_path, part):
        more = ["--config", tmp_path / "config.json"]
        wrong = invoke("run", source, *more, "--out", part)
        assert wrong.exit_code == 2 and "is part of the checkpoint" in wrong.output
    assert part.stat().st_size == size


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", ["nowhere.npy", "."])
def test_an_input_that_is_no_file(tmp_path: Path, name: str) -> None:
    invoke("synth", "--model", "tiny", "--out", tmp_path, "--dtype", "f32")
    wrong = invoke("run", tmp_path, "--input", tmp_path / name)
    assert wrong.exit_code == 2 and "'--input'" in wrong.output
    assert name in wrong.output


@pytest.mark.usefixtures("tiny")
def test_inputs_that_are_no_numbers(tmp_path: Path) -> None:
    invoke("synth", "--model", "tiny", "--out", tmp_path, "--dtype", "f32")
    words, objects, text = (tmp_path / f"{n}.npy" for n in ("words", "objects", "text"))
    np.save(words, np.full((2, 32), "word"))
    np.save(objects, np.full((2, 32), None), allow_pickle=True)
    text.write_text("0.5 0.5")
    for path in (words, objects, text):
        wrong = invoke("run", tmp_path, "--input", path, "--out", tmp_path / "o.safetensors")
        assert isinstance(wrong.exception, CheckpointError) and path.name in str(wrong.exception)


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if not name.startswith("gguf")])
def test_synth_of_a_scheme(tmp_path: Path, scheme: str) -> None:
    made = invoke("synth", "--scheme", scheme, "--out", tmp_path, "--shards", 2)
    assert made.exit_code == 0 and "a tiny model" in made.output, made.output
    out = tmp_path / "out.safetensors"
    for kind in ("f32", "bf16"):
        result = invoke("run", tmp_path, "--tokens", 5, "--grad", "--dtype", kind, "--out", out)
        assert result.exit_code == 0 and f"values in {kind}" in result.output, result.output
        file = SafetensorsFile(out)
        assert file["y"].dtype == moec.numpy_dtype(kind)
        y = file["y"].astype(np.float32)
        assert np.isfinite(y).all() and 0.05 < y.std() < 1.5
        assert not any("experts" in name and "bias" not in name for name in file)


def test_a_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    made = invoke("synth", "--scheme", "gguf-q4_k", "--out", tmp_path)
    assert made.exit_code == 0, made.output
    out = tmp_path / "out.safetensors"
    for path in (tmp_path, tmp_path / "model.gguf"):
        result = invoke("run", path, "--tokens", 5, "--out", out)
        assert result.exit_code == 0 and "gguf-q4_k" in result.output, result.output
    made = invoke("synth", "--scheme", "nf4", "--out", tmp_path)  # takes the other's place
    assert made.exit_code == 0 and not (tmp_path / "model.gguf").exists()


def test_schemes_that_are_refused(tmp_path: Path) -> None:
    wrong = invoke("synth", "--scheme", "awx", "--out", tmp_path)
    assert wrong.exit_code == 2 and "did you mean awq?" in wrong.output
    wrong = invoke("synth", "--out", tmp_path)
    assert wrong.exit_code == 2 and "--model is missing" in wrong.output
    for command in (["synth", "--out", tmp_path], ["bench"]):
        wrong = invoke(*command, "--scheme", "awq", "--model", "gpt-oss-20b")
        assert wrong.exit_code == 2 and "not published as awq" in wrong.output
    wrong = invoke("synth", "--scheme", "gguf-q4_0", "--model", "jamba-mini", "--out", tmp_path)
    assert wrong.exit_code == 2 and "GGUF" in wrong.output


@pytest.mark.usefixtures("tiny")
def test_a_type_of_plain_experts(tmp_path: Path) -> None:
    invoke("synth", "--model", "tiny", "--out", tmp_path)
    wrong = invoke("run", tmp_path, "--dtype", "f32", "--out", tmp_path / "o.safetensors")
    assert isinstance(wrong.exception, CheckpointError) and "plain bf16" in str(wrong.exception)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("mode", [["--naive"], ["--backward"]], ids=" ".join)
@pytest.mark.parametrize(("scheme", "low", "high"), [("nf4", 4.4, 5.2), ("int8", 8.1, 9.0)])
def test_bench_of_a_scheme(
    tmp_path: Path, scheme: str, low: float, high: float, mode: list[str]
) -> None:
    """Bytes are those of codes and scales; with all experts reached GB/s is bytes over time."""
    figures = tmp_path / "b.json"
    result = invoke("bench", "--model", "tiny", "--scheme", scheme, "--tokens", 512, "--seconds", 0,
                    "--json", figures, *mode)
    assert result.exit_code == 0 and f"{scheme} as bf16" in result.output, result.output
    found = json.loads(figures.read_text())
    assert found["scheme"] == scheme and low < found["weight_bits"] < high
    assert found["weight_bytes"] == pytest.approx(found["weight_bits"] / 8 * 8 * 3 * 32 * 24)
    timing = found["timings"][0]
    rate = 0 if "--backward" in mode else found["weight_bytes"] / timing["seconds"] / 1e9
    assert timing["gbytes"] == pytest.approx(rate, rel=1e-3)


def test_run_of_a_golden_file(tmp_path: Path) -> None:
    path = golden.default_folder() / "deepseek_v3.safetensors"
    result = invoke("run", path, "--grad", "--out", tmp_path / "o.safetensors")
    assert result.exit_code == 0 and "worst row against the y" in result.output
    assert "p.experts.down_proj" in "".join(
        n for n in SafetensorsFile(tmp_path / "o.safetensors"))


NAMES = [("qwen3-30", "qwen3-30b"), ("Mixtral", "mixtral-8x7b")]


@pytest.mark.parametrize(("wrong", "right"), NAMES)
def test_a_wrong_model_name(wrong: str, right: str) -> None:
    result = invoke("bench", "--model", wrong)
    assert result.exit_code == 2 and f"did you mean {right}" in " ".join(result.output.split())


def test_a_wrong_device_and_plot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Usage errors, before anything is made or timed."""
    monkeypatch.setattr(bench, "Bench", None)
    for options, text in ((["--device", "gpu"], "cuda:N"), (["--plot", "s.xyz"], "'.xyz'")):
        wrong = invoke("bench", "--model", "qwen3-30b", *options)
        assert wrong.exit_code == 2 and text in wrong.output
    assert bench._plot_file(tmp_path / "speed") == tmp_path / "speed.png"
    assert bench._plot_file(tmp_path / "speed.SVG") == tmp_path / "speed.SVG"


def test_a_wrong_command_and_dtype() -> None:
    assert "check" in invoke("chekc").output
    assert "bf16, f16 and f32" in invoke("bench", "--model", "qwen3-30b", "--dtype", "int8").output


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("mode", [["--naive"], ["--backward"], []])
def test_bench(tmp_path: Path, mode: list[str]) -> None:
    figures, plot = tmp_path / "b.json", tmp_path / "b.png"
    result = invoke("bench", "--model", "tiny", "--tokens", 1, "--tokens", 7, "--seconds", 0,
                    "--json", figures, "--plot", plot, *mode)
    assert result.exit_code == 0, result.output
    timings = json.loads(figures.read_text())["timings"]
    assert len(timings) == (4 if mode == ["--naive"] else 2)
    assert all(t["seconds"] > 0 and t["gflops"] > 0 for t in timings)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert ("speed-up" in result.output) == (mode == ["--naive"])


@pytest.mark.parametrize(("command", "option"), [
    ("run", "--out"), ("check", "--json"), ("bench", "--json"), ("bench", "--plot"),
])
def test_files_that_cannot_be_made(
    tiny: None, tmp_path: Path, command: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before anything is computed, naming the option, the file and its folder."""
    for name in ("run", "check", "bench"):
        monkeypatch.delattr(f"moec.cli.{name}.Context")
    invoke("synth", "--model", "tiny", "--out", tmp_path / "m")
    more = {"run": [tmp_path / "m"], "bench": ["--model", "tiny"]}.get(command, [])
    for path, text in ((tmp_path / "absent" / "o.png", f"there is no folder {tmp_path}/absent"),
                       (tmp_path, f"{tmp_path} is a folder; the name of a file is needed")):
        wrong = invoke(command, *more, option, path)
        output = " ".join(wrong.output.replace("\u2502", " ").split())
        assert wrong.exit_code == 2 and option in output and text in output, output


def test_files_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    """Not the file that is written beside them first."""
    path = tmp_path / "absent" / "o.safetensors"
    with pytest.raises(FileNotFoundError, match="absent/o.safetensors"):
        checkpoint.write(path, {"x": np.zeros(1, np.float32)}, {})


def test_every_shape_can_be_synthesised() -> None:
    """Names, families and configs of the shapes file hold together (full size is not made)."""
    for shape in shapes.load().values():
        family = BY_MODEL_TYPE[shape.model_type]
        sizes = [one.dims for one in synth._list_tensors(shape, family, 0, None)]
        assert len(sizes) >= 3 and synth.config_of(shape)["model_type"] == shape.model_type


def test_the_installed_program(tmp_path: Path) -> None:
    program = shutil.which("moec", path=str(Path(sys.executable).parent))
    assert program, "the wheel installs no moec program"
    done = subprocess.run([program, "run", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1 and "error:" in done.stderr and "Traceback" not in done.stderr


def test_run_of_a_draft(tmp_path: Path) -> None:
    own = synth.make(tiny_shape("qwen3_moe"), dtype="f32")
    draft = synth.make(tiny_shape("qwen3_moe"), dtype="f32", seed=1)
    renamed = {name.replace("model.", "mtp."): array for name, array in draft.items()}
    synth.write(synth.MemoryCheckpoint(own | renamed, own.config), tmp_path / "m")
    out = tmp_path / "o.safetensors"
    for option, made in (((), own), (("--layer", 0), own), (("--layer", "mtp.0"), draft)):
        result = invoke("run", tmp_path / "m", "--tokens", 5, *option, "--out", out)
        assert result.exit_code == 0, result.output
        file = SafetensorsFile(out)
        gate = made["model.layers.0.mlp.gate.weight"]
        np.testing.assert_allclose(file["logits"], file["x"] @ gate.T, atol=1e-5)
        assert "mtp.layers 0 to 0" in result.output
