# SPDX-License-Identifier: Apache-2.0
"""moec.jax under jit and grad: golden families, and the experts beside plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import FAMILIES, NAMED, compare_gradients, dot_error, golden_layer, layouts, stacked

import moec
import moec.jax
from moec.golden import row_error

T, H, I, E, K = 13, 32, 24, 8, 2  # noqa: E741


@pytest.mark.parametrize("family", FAMILIES)
def test_golden(family: str) -> None:
    """Every family forward and backward; the most different ones under jit."""
    checkpoint, spec = golden_layer(family)
    arrays = stacked(spec.matrices) | spec.inputs
    if spec.shared is not None:
        arrays |= {f"shared_expert_{n}": a for n, a in stacked(spec.shared).items()}
    data = {n: jnp.asarray(a) for n, a in arrays.items()}
    for name in ("shared_expert_gate", "shared_expert_up", "shared_expert_down",
                 "shared_expert_gate_up"):
        if name in data and data[name].ndim == 2:
            data[name] = data[name][None]

    def run(x: jax.Array, parameters: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y = moec.jax.layer(x, parameters, router=spec.router, experts=spec.experts,
                           save=moec.Save.ALL, **layouts(spec))
        return (y * jnp.asarray(checkpoint["dout"]).reshape(y.shape)).sum(), y

    whole = jax.value_and_grad(run, argnums=(0, 1), has_aux=True, allow_int=True)
    if family in NAMED:
        whole = jax.jit(whole)
    (_, y), (d_x, d_parameters) = whole(jnp.asarray(checkpoint["x"]), data)
    assert row_error(np.asarray(y), checkpoint["y"]) <= 2e-5
    got = {n: np.asarray(g) for n, g in d_parameters.items() if g.dtype == np.float32}
    compare_gradients(spec, checkpoint, got | {"x": np.asarray(d_x)})


def reference(x, ids, weights, gate_up, down):
    """Gated experts, all of them for every token, weighted afterwards."""
    gate, up = jnp.split(jnp.einsum("th,enh->ten", x, gate_up), 2, -1)
    rows = jnp.einsum("ten,ehn->teh", jax.nn.silu(gate) * up, down)
    mix = (jax.nn.one_hot(ids, len(down)) * weights[..., None]).sum(1)
    return jnp.einsum("te,teh->th", mix, rows)


def problem(dtype=jnp.float32):
    keys = jax.random.split(jax.random.PRNGKey(0), 5)
    x = jax.random.normal(keys[0], (T, H), dtype)
    weights, ids = jax.lax.top_k(jax.nn.softmax(jax.random.normal(keys[1], (T, E))), K)
    gate_up = jax.random.normal(keys[2], (E, 2 * I, H), dtype) / 6
    down = jax.random.normal(keys[3], (E, H, I), dtype) / 5
    return x, ids, weights, gate_up, down, jax.random.normal(keys[4], (T, H), dtype)


DESC = moec.ExpertsDesc(hidden=H, inter=I, num_experts=E, top_k=K)


def moec_experts(x, ids, weights, gate_up, down):
    return moec.jax.experts(x, ids, weights, {"gate_up": gate_up, "down": down}, desc=DESC)


def gradients(function, x, ids, weights, gate_up, down, d_y):
    def loss(x, weights, gate_up, down):
        return (function(x, ids, weights, gate_up, down) * d_y).astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(x, weights, gate_up, down)


def test_experts_against_autodiff() -> None:
    arrays = problem()
    with jax.default_matmul_precision("highest"):
        want = [reference(*arrays[:5]), *gradients(reference, *arrays)]
    got = [jax.jit(moec_experts)(*arrays[:5]), *gradients(moec_experts, *arrays)]
    for a, b in zip(got, want, strict=True):
        assert row_error(np.asarray(a), np.asarray(b)) <= 2e-5


def test_a_gate_up_swap_is_seen() -> None:
    x, ids, weights, gate_up, down, _ = problem()
    swapped = gate_up.at[3].set(jnp.roll(gate_up[3], I, 0))
    y = moec_experts(x, ids, weights, swapped, down)
    assert row_error(np.asarray(y), np.asarray(reference(x, ids, weights, gate_up, down))) > 1e-2


def test_bf16_and_vmap_and_many_dimensions() -> None:
    x, ids, weights, gate_up, down, _ = problem(jnp.bfloat16)
    y = moec_experts(x, ids, weights, gate_up, down)
    wide = [a.astype(jnp.float32) for a in (x, weights, gate_up, down)]
    want = np.asarray(reference(wide[0], ids, *wide[1:]))
    assert y.dtype == jnp.bfloat16 and row_error(np.asarray(y, np.float32), want) <= 2e-2
    x3 = x[:12].reshape(3, 4, H)
    flat = moec_experts(x3, ids[:12], weights[:12], gate_up, down)
    assert flat.shape == x3.shape and (flat.reshape(12, H) == y[:12]).all()
    mapped = jax.vmap(moec_experts, in_axes=(0, 0, 0, None, None))
    parts = [a[:12].reshape(3, 4, -1) for a in (x, ids, weights)]
    assert (mapped(*parts, gate_up, down).reshape(12, H) == y[:12]).all()


def test_auxiliary_loss_reaches_the_router() -> None:
    x, _, _, gate_up, down, _ = problem()
    gate = jax.random.normal(jax.random.PRNGKey(9), (E, H))
    router = moec.RouterDesc(num_experts=E, top_k=K, norm=moec.Norm.SUM)

    def loss(gate):
        parameters = {"gate_weight": gate, "gate_up": gate_up, "down": down}
        _, routing = moec.jax.route_and_layer(x, parameters, router=router, experts=DESC)
        return jnp.square(jax.nn.logsumexp(routing.logits, -1)).mean()

    want = jax.grad(lambda g: jnp.square(jax.nn.logsumexp(x @ g.T, -1)).mean())(gate)
    assert row_error(np.asarray(jax.grad(loss)(gate)), np.asarray(want)) <= 1e-4


def test_refusals_arrive() -> None:
    x, ids, weights, gate_up, down, _ = problem()
    with pytest.raises(Exception, match="moec_experts_forward: x"):
        jax.block_until_ready(moec_experts(x[:, :-1], ids, weights, gate_up, down))
    with pytest.raises(TypeError, match="gate_weigth"):
        moec.jax.experts(x, ids, weights, {"gate_weigth": x, "down": down}, desc=DESC)
    with pytest.raises(TypeError, match="expert_ids is None; an array"):
        moec.jax.experts(x, None, weights, {"gate_up": gate_up, "down": down}, desc=DESC)
    with pytest.raises(TypeError, match="down is missing"):
        moec.jax.experts(x, ids, weights, {"gate_up": gate_up}, desc=DESC)


def test_gradients_start_at_the_logits_only() -> None:
    """The routing weights count as constants."""
    x, _, _, gate_up, down, _ = problem()
    gate = jax.random.normal(jax.random.PRNGKey(9), (E, H))
    router = moec.RouterDesc(num_experts=E, top_k=K)

    def loss(gate, factor):
        parameters = {"gate_weight": gate, "gate_up": gate_up, "down": down}
        y, routing = moec.jax.route_and_layer(x, parameters, router=router, experts=DESC)
        return y.sum() + factor * jnp.square(routing.routing_weights).sum()

    assert "stop_gradient" in str(jax.make_jaxpr(loss)(gate, 1.0))
    without = jax.grad(loss)(gate, 0.0)
    assert without.any() and (jax.grad(loss)(gate, 9.0) == without).all()


@pytest.mark.parametrize("scalar", [np.float32, jnp.float32, jnp.bfloat16])
def test_scalars_of_other_kinds(scalar) -> None:
    x, _, _, gate_up, down, _ = problem()
    gate = jax.random.normal(jax.random.PRNGKey(9), (E, H))
    parameters = {"gate_weight": gate, "gate_up": gate_up, "down": down}
    y, same = (
        moec.jax.layer(x, parameters, experts=DESC,
                       router=moec.RouterDesc(num_experts=E, top_k=K, scale=scale))
        for scale in (scalar(2.5), 2.5)
    )
    assert (y == same).all()


def test_arrays_of_jax_are_no_outputs() -> None:
    """They do not change: a compiled function may have one as a constant."""
    out = jnp.zeros((4, E))
    with moec.Context(num_threads=1) as context:
        router = moec.Router(context, moec.RouterDesc(num_experts=E, top_k=K))
        with pytest.raises(BufferError, match="read-only"):
            router.gate(jnp.ones((4, H)), jnp.ones((E, H)), out=out)
        assert (router.gate(jnp.ones((4, H)), jnp.ones((E, H))) == H).all()
    assert not out.any()


def test_what_gradients_and_jitter_need() -> None:
    x, ids, weights, gate_up, down, _ = problem()
    parameters = {"gate_up": gate_up, "down": down}

    def loss(x):
        return moec.jax.experts(x, ids, weights, parameters, desc=DESC, save=moec.Save.NONE).sum()

    assert jnp.isfinite(loss(x))
    with pytest.raises(ValueError, match="choose save="):
        jax.grad(loss)(x)
    router = moec.RouterDesc(num_experts=E, top_k=K, jitter=0.1)
    with pytest.raises(NotImplementedError, match="jitter 0.1"):
        moec.jax.layer(x, parameters, router=router, experts=DESC)


def test_no_tokens() -> None:
    _, _, _, gate_up, down, _ = problem()
    none = (jnp.zeros((0, H)), jnp.zeros((0, K), jnp.int32), jnp.zeros((0, K)))
    assert moec_experts(*none, gate_up, down).shape == (0, H)


@pytest.mark.gpu
def test_cuda() -> None:
    """bf16 experts on the GPU, under jit and grad."""
    assert jax.default_backend() == "gpu"
    with jax.default_device(jax.devices("cpu")[0]):  # XLA takes half a minute to tune it on a GPU
        keys = jax.random.split(jax.random.PRNGKey(0), 5)
        x = jax.random.normal(keys[0], (200, 256), jnp.bfloat16)
        weights, ids = jax.lax.top_k(jax.nn.softmax(jax.random.normal(keys[1], (200, E))), K)
        gate_up = jax.random.normal(keys[2], (E, 256, 256), jnp.bfloat16) / 16
        down = jax.random.normal(keys[3], (E, 256, 128), jnp.bfloat16) / 11
        d_y = jax.random.normal(keys[4], x.shape, jnp.bfloat16)
        arrays = x, ids, weights, gate_up, down, d_y
        wide = [a if a is ids else a.astype(jnp.float32) for a in arrays]
        want = [reference(*wide[:5]), *gradients(reference, *wide)]
    size = {"hidden": 256, "inter": 128, "num_experts": E, "top_k": K}

    def run(x, ids, weights, gate_up, down):
        parameters = {"gate_up": gate_up, "down": down}
        return moec.jax.experts(x, ids, weights, parameters, desc=moec.ExpertsDesc(**size))

    arrays = jax.device_put(arrays, jax.devices("gpu")[0])
    got = [jax.jit(run)(*arrays[:5]), *gradients(run, *arrays)]
    assert all(a.devices() == {jax.devices("gpu")[0]} for a in got)
    for name, a, b in zip(("y", "x", "weights", "gate_up", "down"), got, want, strict=True):
        measure = dot_error if name == "weights" else row_error
        error = measure(np.asarray(a, np.float32), np.asarray(b))
        assert error <= 2e-2, f"{name}: {error:.2e}"
