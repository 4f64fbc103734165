# SPDX-License-Identifier: Apache-2.0
"""Router, plan, experts, permute and losses on their own, against the whole layer or NumPy."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import moec
from conftest import E, H, I, K, T, assert_close, small_experts, small_router
from moec import PlanField


@pytest.fixture
def steps(problem: SimpleNamespace) -> SimpleNamespace:
    """The layer's problem, taken apart."""
    p = problem
    p.router = moec.Router(p.context, small_router())
    p.experts = moec.Experts(p.context, small_experts())
    p.plan = moec.Plan(p.context, moec.PlanDesc(max_tokens=T, num_experts=E, top_k=K))
    p.logits = p.router.gate(p.x, p.gate)
    return p


def test_steps_equal_the_layer(steps: SimpleNamespace) -> None:
    p = steps
    whole = p.layer.forward(p.x, p.weights, p.gate,
                            want=["logits", "expert_ids", "routing_weights"])
    wanted = p.layer.backward(whole, p.d_y)
    routing = p.router.route(p.logits)
    p.plan.from_topk(routing.expert_ids, routing.routing_weights)
    result = p.experts.forward(p.plan, p.x, p.weights)
    np.testing.assert_array_equal(p.logits, whole.logits)
    np.testing.assert_array_equal(routing.expert_ids, whole.expert_ids)
    np.testing.assert_array_equal(routing.routing_weights, whole.routing_weights)
    np.testing.assert_array_equal(result.y, whole.y)

    grads = p.experts.backward(result, p.d_y)
    d_logits = p.router.route_backward(p.logits, routing.expert_ids, grads.routing_weights)
    d_x, d_gate = np.empty_like(p.x), np.empty_like(p.gate)
    p.router.gate_backward(p.x, p.gate, d_logits, d_x=d_x, d_weight=d_gate)
    assert_close(grads.x + d_x, wanted.x, 1e-6)
    assert_close(d_gate, wanted.gate_weight, 1e-6)
    np.testing.assert_array_equal(grads.expert_weights.down, wanted.expert_weights.down)


def test_steps_with_jitter_equal_the_layer(problem: SimpleNamespace) -> None:
    """With JITTER_X the experts' d_x goes through the noise, too."""
    p = problem
    desc = small_router(jitter=0.3, seed=3, flags=moec.RouterFlags.JITTER_X)
    layer, router = moec.Layer(p.context, desc, small_experts()), moec.Router(p.context, desc)
    wanted = layer.backward(layer.forward(p.x, p.weights, p.gate), p.d_y)
    jittered, d_x = np.empty_like(p.x), np.empty_like(p.x)
    logits = router.gate(p.x, p.gate, x_jittered=jittered)
    routing = router.route(logits)
    plan = moec.Plan(p.context, moec.PlanDesc(max_tokens=T, num_experts=E, top_k=K))
    experts = moec.Experts(p.context, small_experts())
    result = experts.forward(plan.from_topk(*routing), jittered, p.weights)
    grads = experts.backward(result, p.d_y)
    d_logits = router.route_backward(logits, routing.expert_ids, grads.routing_weights)
    router.gate_backward(p.x, p.gate, d_logits, d_x_jittered=grads.x, d_x=d_x)
    assert_close(d_x, wanted.x, 1e-6)


def test_gradients_have_their_parameters_types(
    problem: SimpleNamespace, rng: np.random.Generator
) -> None:
    p, bf16 = problem, ml_dtypes.bfloat16
    experts = moec.Experts(p.context, small_experts(
        dtype="bf16", shared=moec.Shared.SOFTMAX2, shared_inter=I))
    weights = moec.Weights.of(p.context, **{n: a.astype(bf16) for n, a in p.arrays.items()})
    shared = moec.Weights.of(p.context, **{n: a[:1].astype(bf16) for n, a in p.arrays.items()})
    around = {"shared_gate": rng.random((2, H), np.float32),
              "shared_gate_bias": rng.random(2, np.float32), "output_bias": p.x[0]}
    plan = moec.Plan(p.context, moec.PlanDesc(max_tokens=T, num_experts=E, top_k=K))
    plan.from_topk(np.arange(T * K, dtype=np.int32).reshape(T, K) % E,
                   np.ones((T, K), np.float32))
    x, d_y = p.x.astype(bf16), p.d_y.astype(bf16)
    result = experts.forward(plan, x, weights, shared_weights=shared, **around)
    grads = experts.backward(result, d_y, around)
    for name, array in around.items():
        got = getattr(grads, name)
        assert got.dtype == np.float32 and got.shape == array.shape and got.any()
    assert_close(grads.output_bias, d_y.astype(np.float32).sum(0), 1e-6)
    none = moec.Experts(p.context, small_experts())
    result = none.forward(plan, p.x, p.weights)
    grads = none.backward(result, p.d_y, around)
    assert [getattr(grads, name) for name in around] == [None] * 3


def test_saved_may_be_read_only(steps: SimpleNamespace) -> None:
    """Backward's input, such as a mapped file; forward's output."""
    p = steps
    p.plan.from_logits(p.router, p.logits)
    for handle, forward in ((p.layer, lambda **more: p.layer.forward(
            p.x, p.weights, p.gate, **more)), (p.experts, lambda **more: p.experts.forward(
            p.plan, p.x, p.weights, **more))):
        result = forward()
        wanted = handle.backward(result, p.d_y)
        result.saved.flags.writeable = False
        np.testing.assert_array_equal(handle.backward(result, p.d_y).x, wanted.x)
        with pytest.raises(BufferError, match="read-only"):
            forward(saved=result.saved)


def test_gate_is_a_gemm(steps: SimpleNamespace) -> None:
    assert_close(steps.logits, steps.x @ steps.gate.T, 1e-6)


def test_plan_views_hold_their_plan(steps: SimpleNamespace) -> None:
    p = steps
    ids, weights = p.router.route(p.logits)
    plan = moec.Plan(p.context, moec.PlanDesc(max_tokens=T, num_experts=E, top_k=K, align=4))
    plan.from_topk(ids.astype(np.int64), weights)
    counts = plan.view(PlanField.COUNTS)
    offsets = plan.view(PlanField.GROUP_OFFSETS)
    totals = plan.totals()
    del plan
    np.testing.assert_array_equal(counts, np.bincount(ids.ravel(), minlength=E))
    np.testing.assert_array_equal(np.diff(offsets), -(-counts // 4) * 4)
    assert totals.routed_rows == T * K and totals.rows == offsets[-1]
    assert totals.largest_group == counts.max() and totals.dropped == 0
    with pytest.raises(ValueError, match="read-only"):
        counts[0] = 1


def test_plan_replays_bit_for_bit(steps: SimpleNamespace) -> None:
    p = steps
    p.plan.from_logits(p.router, p.logits)
    y = p.experts.forward(p.plan, p.x, p.weights).y
    data = p.plan.save()
    again = moec.Plan(p.context, p.plan.desc).restore(data)
    np.testing.assert_array_equal(p.experts.forward(again, p.x, p.weights).y, y)
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= 1
    with pytest.raises(moec.CorruptError):
        again.restore(bytes(damaged))


def test_plan_in_the_callers_memory(steps: SimpleNamespace) -> None:
    desc = steps.plan.desc
    num_bytes, max_rows = moec.plan_size(desc)
    assert max_rows >= T * K
    memory = np.zeros(num_bytes, np.uint8)
    moec.Plan(steps.context, desc, memory=memory).from_logits(steps.router, steps.logits)
    other = moec.Plan(steps.context, desc, memory=memory.copy()).attach(T)
    steps.plan.from_logits(steps.router, steps.logits)
    for field in (PlanField.COUNTS, PlanField.ASSIGNMENT_ROW, PlanField.ROW_TOKEN):
        np.testing.assert_array_equal(other.view(field), steps.plan.view(field))


def test_plan_from_map(steps: SimpleNamespace) -> None:
    ids, weights = steps.router.route(steps.logits)
    routed, probs = np.zeros((T, E), bool), np.zeros((T, E), np.float32)
    np.put_along_axis(routed, ids, True, 1)
    np.put_along_axis(probs, ids, weights, 1)
    plan = steps.plan.from_map(routed, probs)
    exported = plan.export(PlanField.EXPERT_IDS, np.empty((T, K), np.int64))
    np.testing.assert_array_equal(exported, np.sort(ids, 1))
    with pytest.raises(moec.IndexOverflowError):
        plan.from_map(np.ones((T, E), np.uint8))


def test_plans_of_rules(steps: SimpleNamespace) -> None:
    p = steps
    ids = (np.arange(T * K, dtype=np.int32) % E).reshape(T, K)
    weights = np.linspace(0, 1, T * K, dtype=np.float32).reshape(T, K)
    want = moec.Plan(p.context, p.plan.desc).from_topk(ids, weights)
    plan = p.plan.from_rule(moec.PlanRule.ROUND_ROBIN, T, weights)
    desc = dataclasses.replace(p.router.desc, selection=moec.Select.ROUND_ROBIN)
    router = moec.Router(p.context, desc)
    np.testing.assert_array_equal(router.route(p.logits).expert_ids, ids)
    for field in (PlanField.GROUP_OFFSETS, PlanField.ROW_TOKEN, PlanField.ROW_WEIGHT):
        np.testing.assert_array_equal(plan.view(field), want.view(field))
    # x [E,C,H], whose rows stay where they are.
    equal = moec.Plan(p.context, moec.PlanDesc(num_experts=E, top_k=1, max_tokens=3 * E))
    equal.from_rule(moec.PlanRule.EQUAL_COUNTS, 3 * E)
    np.testing.assert_array_equal(equal.view(PlanField.COUNTS), np.full(E, 3))
    np.testing.assert_array_equal(equal.view(PlanField.ROW_TOKEN), np.arange(3 * E))
    with pytest.raises(moec.ShapeError, match="multiple"):
        equal.from_rule(moec.PlanRule.EQUAL_COUNTS, 3 * E - 1)


REBUILDS = {
    "topk": lambda p, ids, weights: p.plan.from_topk(ids[:, ::-1].copy(), weights),
    "logits": lambda p, ids, weights: p.plan.from_logits(p.router, p.logits),
    "map": lambda p, ids, weights: p.plan.from_map(np.eye(T, E, dtype=np.uint8)),
    "rule": lambda p, ids, weights: p.plan.from_rule(moec.PlanRule.ROUND_ROBIN, T),
    "restore": lambda p, ids, weights: p.plan.restore(p.plan.save()),
    "attach": lambda p, ids, weights: p.plan.attach(T),
}


@pytest.mark.parametrize("name", REBUILDS)
def test_backward_wants_the_plan_of_its_forward(steps: SimpleNamespace, name: str) -> None:
    p = steps
    ids, weights = p.router.route(p.logits)
    result = p.experts.forward(p.plan.from_topk(ids, weights), p.x, p.weights)
    with pytest.raises(moec.ShapeError):  # refused, so that the plan is as it was
        p.plan.from_topk(ids[:, :-1].copy(), weights)
    p.experts.backward(result, p.d_y)
    REBUILDS[name](p, ids, weights)
    with pytest.raises(moec.StateError, match="built 2 times and had been 1 times"):
        p.experts.backward(result, p.d_y)
    p.experts.backward(p.experts.forward(p.plan, p.x, p.weights), p.d_y)


def test_expert_choice(steps: SimpleNamespace, rng: np.random.Generator) -> None:
    p, capacity = steps, 3
    scores = rng.random((T, E), np.float32)
    plan = moec.Plan(p.context, moec.PlanDesc(
        max_tokens=T, num_experts=E, top_k=0, capacity=capacity,
        kind=moec.PlanKind.EXPERT_CHOICE)).from_scores(scores)
    np.testing.assert_array_equal(plan.view(PlanField.COUNTS), np.full(E, capacity))
    experts = moec.Experts(p.context, moec.ExpertsDesc(
        hidden=H, inter=I, num_experts=E, top_k=0, max_rows_base=E * capacity,
        save=moec.Save.ALL))
    result = experts.forward(plan, p.x, p.weights)
    grads = experts.backward(result, p.d_y)
    y = np.zeros_like(p.x)
    for e in range(E):
        for t in np.argsort(-scores[:, e], kind="stable")[:capacity]:
            gate, up = np.split(p.x[t] @ p.arrays["gate_up"][e].T, 2)
            y[t] += scores[t, e] * (gate / (1 + np.exp(-gate)) * up) @ p.arrays["down"][e].T
    assert_close(result.y, y)
    assert grads.routing_weights.shape == (E * capacity,)
    plan.from_scores(scores)
    with pytest.raises(moec.StateError, match="built 2 times"):
        experts.backward(result, p.d_y)


@pytest.mark.parametrize("align", [1, 8])
def test_permute_and_back(steps: SimpleNamespace, align: int) -> None:
    p = steps
    plan = moec.Plan(p.context, dataclasses.replace(p.plan.desc, align=align))
    plan.from_logits(p.router, p.logits)
    tokens, weights = plan.view(PlanField.ROW_TOKEN), plan.view(PlanField.ROUTING_WEIGHTS)
    rows = moec.permute(p.context, plan, p.x)
    used = plan.totals().rows
    assert len(rows) == len(tokens) >= used
    expected = np.where(tokens[:used, None] < 0, 0, p.x[tokens[:used]])
    np.testing.assert_array_equal(rows[:used], expected)
    assert not rows[used:].any()
    y = moec.unpermute(p.context, plan, rows, num_tokens=T, routing_weights=weights.copy())
    assert_close(y, p.x * weights.sum(-1, keepdims=True))
    d_routing_weights = np.empty((T, K), np.float32)
    d_rows = moec.unpermute_backward(p.context, plan, p.d_y, rows, routing_weights=weights.copy(),
                                     d_routing_weights=d_routing_weights)
    assert_close(d_routing_weights, np.repeat((p.x * p.d_y).sum(-1, keepdims=True), K, 1))
    d_x = moec.permute_backward(p.context, plan, d_rows, num_tokens=T)
    assert_close(d_x, p.d_y * weights.sum(-1, keepdims=True))


def test_losses(context: moec.Context, rng: np.random.Generator) -> None:
    logits = rng.standard_normal((T, E), np.float32)
    z = moec.Loss(kind=moec.LossKind.Z, coefficient=0.5)
    lse = np.log(np.exp(logits).sum(-1))
    assert z(context, logits)[0] == pytest.approx(0.5 * (lse**2).mean(), rel=1e-5)
    (d_logits,) = z.backward(context, logits, d_loss=np.array([2], np.float32))
    p = np.exp(logits - lse[:, None])
    assert_close(d_logits, 2 * 0.5 * 2 * lse[:, None] / T * p)
    (twice,) = z.backward(context, logits, d_loss=np.array([2], np.float32), out=[d_logits.copy()])
    assert_close(twice, 2 * d_logits)
    balance = moec.Loss(kind=moec.LossKind.BALANCE_SWITCH, top_k=K)
    assert balance(context, logits)[0] >= 0.5


def test_bias_update(steps: SimpleNamespace) -> None:
    counts = np.arange(E, dtype=np.int32)
    bias = np.zeros(E, np.float32)
    steps.router.update_bias(counts, bias, rate=0.25)
    np.testing.assert_array_equal(bias, 0.25 * np.sign(counts.mean() - counts))


def test_accumulation_and_skipped_outputs(problem: SimpleNamespace) -> None:
    p = problem
    result = p.layer.forward(p.x, p.weights, p.gate)
    once = p.layer.backward(result, p.d_y, want=["gate_weight", "expert_weights"])
    assert once.x is None
    into = moec.LayerGradients(gate_weight=once.gate_weight.copy())
    p.layer.backward(result, p.d_y, into=into, flags=moec.GradFlags.ACCUMULATE)
    assert_close(into.gate_weight, 2 * once.gate_weight, 1e-6)


def test_saved_state_is_replayable(problem: SimpleNamespace) -> None:
    """Every save policy gives the same gradients; sizes are exact and affine in T."""
    p, seen = problem, []
    for save in (moec.Save.INPUT, moec.Save.PREACT, moec.Save.ALL):
        layer = moec.Layer(p.context, small_router(), small_experts(save=save))
        result = layer.forward(p.x, p.weights, p.gate)
        assert result.saved.nbytes == layer.sizes.saved.base + T * layer.sizes.saved.per_token
        seen.append(layer.backward(result, p.d_y))
    for grads in seen[1:]:
        np.testing.assert_array_equal(grads.x, seen[0].x)
        np.testing.assert_array_equal(grads.expert_weights.down, seen[0].expert_weights.down)


def test_the_routers_own_input(problem: SimpleNamespace, rng: np.random.Generator) -> None:
    """Of another width than the experts'."""
    p = problem
    router_x = rng.standard_normal((T, 24), np.float32)
    gate = rng.standard_normal((E, 24), np.float32)
    result = p.layer.forward(p.x, p.weights, gate, router_x=router_x)
    grads = p.layer.backward(result, p.d_y)
    assert grads.router_x.shape == (T, 24) and np.abs(grads.router_x).max() > 0


def test_frozen_weights(problem: SimpleNamespace, tmp_path: object) -> None:
    p = problem
    expected = p.layer.forward(p.x, p.weights, p.gate).y
    arrays = {name: array.copy() for name, array in p.arrays.items()}
    frozen = moec.Weights.of(p.context, frozen=True, **arrays)
    assert frozen.info().is_frozen and not frozen.info().is_packed
    if frozen.info().packed_bytes:
        frozen.pack()
        assert frozen.info().is_packed and frozen.info().packed_format
    assert_close(p.layer.forward(p.x, frozen, p.gate).y, expected, 1e-6)
    arrays["down"] *= 2
    frozen.refresh()
    assert_close(p.layer.forward(p.x, frozen, p.gate).y, 2 * expected, 1e-6)
    if frozen.info().is_packed:
        path = f"{tmp_path}/packed.moec"
        frozen.save(path)
        mapped = moec.Weights(p.context, frozen.desc).map(path)
        assert_close(p.layer.forward(p.x, mapped, p.gate).y, 2 * expected, 1e-6)


def test_paths_of_every_kind(problem: SimpleNamespace, tmp_path: Path) -> None:
    frozen = moec.Weights.of(problem.context, frozen=True, **problem.arrays)
    if not frozen.info().packed_bytes:
        pytest.skip("nothing is packed on this machine")
    frozen.pack()
    base = os.fsencode(tmp_path)
    accent = str(tmp_path / "\u00e9")
    for path in (tmp_path / "a", base + b"/b", os.fsdecode(base + b"/\xff"), accent):
        frozen.save(path)
        assert os.path.exists(path)
        moec.Weights(problem.context, frozen.desc).map(path)
    for path in ("a\0b", b"a\0b"):
        for use in (frozen.save, frozen.map, moec.load_backend):
            with pytest.raises(ValueError, match="null byte"):
                use(path)
    with pytest.raises(TypeError):
        frozen.save(3)
    with pytest.raises(moec.DeviceError):
        moec.load_backend(tmp_path / "nothing.so")


def test_describe(problem: SimpleNamespace) -> None:
    experts = moec.Experts(problem.context, small_experts())
    for described in (problem.layer, experts):
        text = described.describe(T, problem.weights)
        assert isinstance(text, dict) and text
        with pytest.raises(TypeError, match="weights"):
            described.describe(T)


def test_expert_choice_of_fewer_tokens_than_capacity(problem: SimpleNamespace) -> None:
    """The gradient of the routing weights has a place for each row that the plan may have."""
    p = problem
    capacity, few = 5, 3
    desc = moec.PlanDesc(max_tokens=T + capacity, num_experts=E, top_k=0,
                         kind=moec.PlanKind.EXPERT_CHOICE, capacity=capacity)
    scores = np.random.default_rng(3).random((few, E), np.float32)
    plan = moec.Plan(p.context, desc).from_scores(scores)
    experts = moec.Experts(p.context, dataclasses.replace(
        small_experts(), top_k=0, max_rows_base=E * capacity))
    result = experts.forward(plan, p.x[:few], p.weights)
    grads = experts.backward(result, p.d_y[:few])
    assert grads.routing_weights.shape == (plan.num_rows,) == (E * capacity,)
