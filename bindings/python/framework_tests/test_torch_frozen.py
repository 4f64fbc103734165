# SPDX-License-Identifier: Apache-2.0
"""What frozen weights see of changes, and what they do not, as freeze() says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch_cases import inputs, make_experts

import moec.torch


def in_place(experts: moec.torch.Experts) -> None:
    with torch.no_grad():
        experts.down.mul_(2)


def load_state_dict(experts: moec.torch.Experts) -> None:
    other = make_experts()
    with torch.no_grad():
        other.down.mul_(2)
    experts.load_state_dict(other.state_dict())


def initialise(experts: moec.torch.Experts) -> None:
    torch.nn.init.constant_(experts.gate_up, 0.25)


def by_data(experts: moec.torch.Experts) -> None:
    experts.down.data.mul_(2)


@pytest.mark.parametrize("change", [in_place, load_state_dict, initialise])
def test_changes_that_version_counters_show(
    change: Callable[[moec.torch.Experts], None],
) -> None:
    """The next call reads them, and one after it reads nothing again."""
    experts, plain = make_experts().freeze(), make_experts()
    x, ids, weights, _ = inputs()
    before = experts(x, ids, weights)
    change(experts)
    change(plain)
    after = experts(x, ids, weights)
    assert torch.equal(after, plain(x, ids, weights)) and not torch.equal(after, before)
    by_data(experts)  # would show if they were read again
    assert torch.equal(experts(x, ids, weights), after)


def test_a_write_to_data_shows_after_refresh() -> None:
    experts = make_experts().freeze()
    x, ids, weights, _ = inputs()
    before = experts(x, ids, weights)
    by_data(experts)
    assert torch.equal(experts(x, ids, weights), before)
    experts.refresh()
    assert torch.equal(experts(x, ids, weights), 2 * before)


def test_a_tensor_of_inference_mode_shows_after_refresh() -> None:
    with torch.inference_mode():
        experts = make_experts()
        assert experts.down.is_inference()
        experts.freeze()
        x, ids, weights, _ = (t.detach() for t in inputs())
        before = experts(x, ids, weights)
        experts.down.mul_(2)
        assert torch.equal(experts(x, ids, weights), before)
        experts.refresh()
        assert torch.equal(experts(x, ids, weights), 2 * before)


def test_another_tensor_raises() -> None:
    experts = make_experts().freeze()
    x, ids, weights, _ = inputs()
    experts.load_state_dict(make_experts().state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="frozen at another address"):
        experts(x, ids, weights)
