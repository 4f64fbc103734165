# SPDX-License-Identifier: Apache-2.0
"""moec.torch with an ep: gloo ranks in processes of their own against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parallel_worker as worker
import pytest
import torch
from ranks import run_ranks

import moec
import moec.torch


@pytest.mark.parametrize("size", [2, 3])
def test_training_equals_one_process(size: int, tmp_path: Path) -> None:
    run_ranks(worker.main, size, tmp_path, "train")
    one = moec.torch.MoELayer(*worker.descs())
    one.load_state_dict(worker.initial())
    want = worker.train(one, 0, 1, False)
    assert want[-1] < 0.98 * want[0]
    for mean in (False, True):
        losses, state = torch.load(tmp_path / f"train_{mean}.pt")
        assert losses == pytest.approx(want, rel=1e-4)
        assert state.keys() == one.state_dict().keys()
        for name, value in one.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4)


def test_experts_equal_one_process(tmp_path: Path) -> None:
    run_ranks(worker.main, 2, tmp_path, "experts")
    parts: list[Any] = [torch.load(tmp_path / f"experts_{rank}.pt") for rank in range(2)]
    one = worker.full_experts()

    def twice(x: Any, ids: Any, weights: Any) -> Any:
        return one(x, ids, weights) + one(2 * x, ids, weights)

    for index, run in enumerate((one, twice)):
        want = worker.gradients(run, list(one.parameters()), 0, 1)
        got = [torch.cat(pair) for pair in zip(*(part[index] for part in parts), strict=True)]
        for have, expected in zip(got, want, strict=True):
            torch.testing.assert_close(have, expected, rtol=1e-4, atol=1e-5)


def test_errors_name_the_rank_and_the_cause(tmp_path: Path) -> None:
    run_ranks(worker.main, 2, tmp_path, "errors")


@pytest.mark.parametrize("case", ["edges", "order"])
def test_edges_and_order(case: str, tmp_path: Path) -> None:
    run_ranks(worker.main, 2, tmp_path, case)


def test_what_cannot_be_parted_is_refused() -> None:
    router, desc = worker.descs()
    with pytest.raises(TypeError, match="a moec.torch.EP is needed"):
        moec.torch.MoELayer(router, desc, ep=1)  # type: ignore[arg-type]
