# SPDX-License-Identifier: Apache-2.0
"""moec.torch with an ep: ranks with a GPU each beside one process, by each scheme that the library
takes; over NCCL and over gloo; DDP beside it; graphs; a rank that dies. Two ranks run where there
are two GPUs, and one for each GPU where there are more. Run by `make test-gpu`;
MOEC_TEST_DEVICE=cpu runs it on gloo's ranks of a CPU, and MOEC_TEST_RANKS=4 on so many more.

Shown to fail: y of a rank, a loss of a training and a gradient of a survivor are changed by a
thousandth.
"""

import functools
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import moec
import pytest
import torch
import torch_ep_ranks as ranks

pytestmark = pytest.mark.skipif(
    ranks.DEVICE == "cuda"
    and (not torch.cuda.is_available() or not moec.devices(moec.DeviceType.CUDA)),
    reason="no GPU that both torch and moec see",
)
SCHEMES = [scheme.name for scheme in moec.EpScheme if scheme != moec.EpScheme.AUTO]
SECONDS = 240
MOST = max(2, int(os.environ.get("MOEC_TEST_RANKS", 0)) or torch.cuda.device_count())
each_case = pytest.mark.parametrize(
    ("scheme", "size"), [(scheme, size) for size in sorted({1, 2, MOST}) for scheme in SCHEMES])


@functools.cache
def run(case, scheme, size):
    """(exit status of each rank, their output, the folder with what they made)"""
    folder = Path(tempfile.mkdtemp())
    made = [subprocess.Popen(
        [sys.executable, ranks.__file__, case, scheme, str(rank), str(size), str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(size)]
    try:
        texts = [rank.communicate(timeout=SECONDS)[0] for rank in made]
    finally:
        for rank in made:
            rank.kill()
    return [rank.returncode for rank in made], "\n".join(texts), folder


def parts_of(case, scheme, size, program="work"):
    """What each rank made of a case. Skips where it was left out."""
    if ranks.DEVICE == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"{size} GPUs are needed")
    status, text, folder = run(program, scheme, size)
    dead = [-signal.SIGKILL] if program == "killed" else []
    left_out = folder / f"{case}_left_out"
    if left_out.exists() and not any(status):
        pytest.skip(left_out.read_text())
    assert status == [0] * (size - len(dead)) + dead, text[-4000:]
    return [torch.load(path) for path in sorted(folder.glob(f"{case}_*.pt"))]


def close(got, want, tolerance=1e-4):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@each_case
def test_layers_of_ranks_are_that_of_one_process(scheme, size):
    parts = parts_of("layers", scheme, size)
    assert len(parts) == size
    batches = ranks.batch(size)
    x, d_y = (torch.cat([one[i] for one in batches]) for i in range(2))
    want = ranks.step(ranks.make_layer(), x, d_y)
    for name in ("y", "d_x"):
        close(torch.cat([part[name] for part in parts]), want[name])
    close(torch.cat([part["down"] for part in parts]), want["down"])
    close(sum(part["gate_weight"] for part in parts), want["gate_weight"], 1e-3)
    one = ranks.make_experts()
    for part, (own, _) in zip(parts, batches, strict=True):
        for name, value in ranks.rows_of(one, own).items():
            close(part[name], value)


@each_case
def test_training_beside_ddp_is_that_of_one_process(scheme, size):
    """And the checkpoint of the ranks is one of one process."""
    parts = parts_of("training", scheme, size)
    x, target = (torch.cat([one[i] for one in ranks.batch(size)]) for i in range(2))
    model = ranks.make_model()
    want = ranks.train(model, x, target, x.numel(), 1)
    assert want[-1] < 0.9 * want[0]
    for losses, _, _ in parts:
        assert losses == pytest.approx(want, rel=1e-4)
    for name, value in model.state_dict().items():
        close(parts[0][1][name].to(ranks.DEVICE), value, 1e-3)
    model.load_state_dict(parts[0][1])
    with torch.no_grad():
        y = model(x.to(ranks.DEVICE)).cpu()
    close(torch.cat([part[2] for part in parts]), y)


@each_case
def test_replays_of_a_step_have_its_bits(scheme, size):
    parts_of("graphs", scheme, size)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_outlive_one_that_dies(scheme):
    parts = parts_of("killed", scheme, MOST, "killed")
    assert len(parts) == MOST - 1
    alive = ranks.batch(MOST)[:-1]
    x, d_y = (torch.cat([one[i] for one in alive]) for i in range(2))
    want = ranks.step(ranks.make_layer(), x, d_y)
    for name in ("y", "d_x"):
        close(torch.cat([part[name] for part in parts]), want[name])
    close(torch.cat([part["down"] for part in parts]), want["down"])
