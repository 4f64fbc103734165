# SPDX-License-Identifier: Apache-2.0
"""The friendly layer covers moec.h: constants, descriptor fields, calls that release the GIL."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from conftest import E, K, T, small_experts, small_router

import moec
from moec import _context, _enums, _raw

HERE = Path(__file__).parents[1]
DESCRIPTORS = {
    moec.RouterDesc: _raw.moec_router_desc,
    moec.Activation: _raw.moec_activation,
    moec.PlanDesc: _raw.moec_plan_desc,
    moec.WeightsDesc: _raw.moec_weights_desc,
    moec.ExpertsDesc: _raw.moec_experts_desc,
    moec.AdaptersDesc: _raw.moec_adapters_desc,
    moec.Factors: _raw.moec_factors,
    moec.Adapter: _raw.moec_adapter,
    moec.DeviceInfo: _raw.moec_device_info,
    moec.EpState: _raw.moec_ep_state,
    moec.Stats: _raw.moec_stats,
    moec.WeightsInfo: _raw.moec_weights_info,
}


@pytest.mark.parametrize("desc", DESCRIPTORS, ids=lambda cls: cls.__name__)
def test_fields_are_the_headers(desc: type) -> None:
    raw = {k for k, v in vars(DESCRIPTORS[desc]).items() if isinstance(v, property)}
    raw -= {"thisown", "struct_size", "reserved", "reserved0", "reserved1"}
    ours = {item.name for item in fields(desc)}
    assert raw - ours <= {"flags"}  # input flags that no bit is defined for
    assert ours <= raw


def test_every_constant_has_an_enum() -> None:
    plain = ("MOEC_E_", "MOEC_VERSION_", "MOEC_ABI_", "MOEC_MAX_", "MOEC_OK", "MOEC_S_",
             "MOEC_API", "MOEC_CHECK")
    header = {v for k, v in vars(_raw).items()
              if k.startswith("MOEC_") and not k.startswith(plain) and isinstance(v, int)}
    names = {k for k in vars(_raw) if k.startswith("MOEC_") and not k.startswith(plain)}
    classes = [c for c in vars(_enums).values() if isinstance(c, enum.EnumMeta)]
    members = sum(len([m for m in c if m.name != "NONE" or m.value or not issubclass(c, enum.Flag)])
                  for c in classes)
    assert members >= len(names)
    assert header <= {int(m) for c in classes for m in c}


def test_misspelt_fields_raise() -> None:
    with pytest.raises(TypeError, match="num_expert"):
        moec.RouterDesc(num_expert=8, top_k=2)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        _raw.moec_router_desc().num_expert = 8


def test_misspelt_arguments_raise(problem: SimpleNamespace) -> None:
    p = problem
    plan = moec.Plan(p.context, moec.PlanDesc(max_tokens=T, num_experts=E, top_k=K))
    router = moec.Router(p.context, small_router())
    experts = moec.Experts(p.context, small_experts())
    calls: dict[str, Callable[..., Any]] = {
        "Layer.forward": partial(p.layer.forward, p.x, p.weights, p.gate),
        "Experts.forward": partial(experts.forward, plan, p.x, p.weights),
        "Router.gate": partial(router.gate, p.x, p.gate),
        "Router.route": partial(router.route, p.x),
        "Plan.from_logits": partial(plan.from_logits, router, p.x),
    }
    for site, call in calls.items():
        with pytest.raises(TypeError, match=f"moec.{site}: no argument 'biass'; .* exist"):
            call(biass=None)
        with pytest.raises(TypeError):  # an output is no input
            call(y=p.x)


def test_none_is_not_a_pointer() -> None:
    with pytest.raises((TypeError, ValueError)):
        _raw.moec_context_stats(None, _raw.moec_stats())
    with pytest.raises((TypeError, ValueError)):
        _raw.moec_gate_args().x = None


def test_integers_are_checked() -> None:
    raw = _raw.moec_router_desc()
    raw.num_experts = moec.Score.SIGMOID  # anything with __index__
    with pytest.raises(OverflowError, match="outside"):
        raw.num_experts = 1 << 31
    with pytest.raises(OverflowError):
        raw.flags = -1
    with pytest.raises(TypeError):
        raw.num_experts = 1.5


@pytest.mark.skipif(not (HERE / "moec_lists.i").is_file(), reason="needs the source tree")
def test_calls_that_may_wait_release_the_gil() -> None:
    """Every function of the header that computes, waits or frees is in the thread list."""
    header = (HERE / "../../capi/include/moec/moec.h").read_text()
    listed = set(re.findall(r"%thread (\w+);", (HERE / "moec_lists.i").read_text()))
    declared = re.findall(r"MOEC_API [^;]*?\b(moec_\w+)\(([^;]*)\);", header)
    long = {name for name, arguments in declared
            if "moec_stream stream" in arguments or name.endswith(("_sync", "_create", "_free"))}
    assert len(long) > 30
    assert long <= listed
    assert listed <= {name for name, _ in declared}


def test_all_names_are_public() -> None:
    """__all__ is written out, as type checkers need it; nothing public is left out."""
    public = {name for name in vars(moec) if not name.startswith("_")}
    modules = {name for name in public if isinstance(getattr(moec, name), ModuleType)}
    assert set(moec.__all__) == public - modules


def test_another_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_raw, "MOEC_ABI_VERSION", _raw.MOEC_ABI_VERSION + 1)
    with pytest.raises(ImportError, match="ABI"):
        _context.check_library()


def test_version_and_build() -> None:
    assert moec.__version__ == moec.version()
    assert re.fullmatch(r"\d+\.\d+\.\d+", moec.version())
    assert moec.abi_version() == _raw.MOEC_ABI_VERSION
    assert moec.build_info()
    assert moec.devices(moec.DeviceType.CPU)[0].multiprocessors >= 1
