# SPDX-License-Identifier: Apache-2.0
"""What the tests share. They run on the installed package, never on the source tree."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

import moec
from moec.golden import row_error
from moec.shapes import Shape

T, H, I, E, K = 13, 32, 24, 8, 2
DEVICES = ["cpu", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "cuda:0"))]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu run when they are asked for by -m, and only then."""
    if "gpu" not in config.option.markexpr:
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(scope="session")
def context() -> Iterator[moec.Context]:
    with moec.Context(num_threads=2) as made:
        yield made


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261121)


def small_router(**more: object) -> moec.RouterDesc:
    return moec.RouterDesc(num_experts=E, top_k=K, norm=moec.Norm.SUM, **more)


def small_experts(**more: object) -> moec.ExpertsDesc:
    options = {"save": moec.Save.ALL} | more
    return moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=K, **options)


@pytest.fixture
def problem(context: moec.Context, rng: np.random.Generator) -> SimpleNamespace:
    """A small fp32 layer with its arrays."""
    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)

    arrays = {"gate_up": normal(E, 2 * I, H), "down": normal(E, H, I)}
    return SimpleNamespace(
        context=context,
        x=rng.standard_normal((T, H), np.float32),
        d_y=rng.standard_normal((T, H), np.float32),
        gate=normal(E, H),
        arrays=arrays,
        layer=moec.Layer(context, small_router(), small_experts()),
        weights=moec.Weights.of(context, **arrays),
    )


def tiny_shape(model_type: str, **more: object) -> Shape:
    """A shape of any family, small enough to test with."""
    config = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "swiglu_limit": 7.0}
    sizes = {"hidden": H, "inter": I, "experts": E, "top_k": K, "shared_inter": 40}
    names = {"name": "tiny", "model_type": model_type, "published": "tiny"}
    return Shape(**names, **{"zero_experts": 0} | sizes | more, config=config)


def assert_close(got: object, ref: object, limit: float = 2e-5) -> None:
    error = row_error(np.asarray(got), np.asarray(ref))
    assert error <= limit, f"worst row error {error:.2e} is above {limit:g}"
