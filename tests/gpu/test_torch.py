# SPDX-License-Identifier: Apache-2.0
"""The Python package on torch tensors in CUDA memory, through DLPack: same memory, the caller's
stream, CUDA graphs, errors. Run by `make test-gpu`.

Shown to fail with plan arrays asked for on the legacy stream (the capture breaks), and with a step
queued on another stream than the one its inputs are written on (test_order_on_a_side_stream).
"""

import gc

import moec
import moec.torch
import pytest
import torch
import torch.nn.functional as F

T, H, I, E, K = 96, 128, 64, 8, 2  # noqa: E741

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not moec.devices(moec.DeviceType.CUDA),
    reason="no GPU that both torch and moec see",
)


def reference(x, ids, weights, gate_up, down):
    """Plain float64 loop over experts."""
    y = torch.zeros_like(x)
    for expert in range(E):
        tokens, slots = torch.where(ids == expert)
        gate, up = (x[tokens] @ gate_up[expert].T).chunk(2, dim=-1)
        rows = (F.silu(gate) * up) @ down[expert].T
        y.index_add_(0, tokens, rows * weights[tokens, slots, None])
    return y


class Step:
    """Plan, forward, backward on one stream, every array the caller's."""

    def __init__(self, dtype=torch.bfloat16, seed=0):
        torch.manual_seed(seed)
        new = lambda *size, scale=1.0: (  # noqa: E731
            torch.randn(size, device="cuda") * scale).to(dtype)
        self.x, self.d_y = new(T, H), new(T, H)
        self.gate_up, self.down = new(E, 2 * I, H, scale=H**-0.5), new(E, H, I, scale=I**-0.5)
        self.ids, self.weights = self.routing(seed)
        self.context = moec.Context("cuda")
        self.held = moec.WeightSet(gate_up=self.gate_up, down=self.down)
        name = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
        form = moec.WeightsDesc(num_experts=E, hidden=H, inter=I,
                                gate_layout=moec.GateLayout.GATE_THEN_UP, dtype=name)
        self.bound = moec.Weights(self.context, form, self.held)
        self.plan = moec.Plan(self.context, moec.PlanDesc(max_tokens=T, num_experts=E, top_k=K))
        self.experts = moec.Experts(self.context, moec.ExpertsDesc(
            num_experts=E, top_k=K, hidden=H, inter=I, dtype=name, save=moec.Save.PREACT))
        self.y = torch.full_like(self.x, torch.nan)
        self.saved = torch.empty(self.experts.sizes.saved.bytes(T), dtype=torch.uint8,
                                 device="cuda")
        self.grads = moec.ExpertsGradients(
            x=torch.full_like(self.x, torch.nan),
            routing_weights=torch.full_like(self.weights, torch.nan),
            expert_weights=moec.WeightSet(gate_up=torch.full_like(self.gate_up, torch.nan),
                                          down=torch.full_like(self.down, torch.nan)))

    @staticmethod
    def routing(seed):
        torch.manual_seed(seed + 100)
        weights, ids = torch.topk(torch.softmax(torch.randn(T, E, device="cuda"), -1), K)
        return ids.to(torch.int32), weights

    def run(self, stream=None):
        stream = stream or torch.cuda.current_stream()
        self.plan.from_topk(self.ids, self.weights, stream=stream)
        result = self.experts.forward(self.plan, self.x, self.bound, out=self.y, saved=self.saved,
                                      stream=stream)
        self.experts.backward(result, self.d_y, into=self.grads, stream=stream)

    def outputs(self):
        g = self.grads
        return [t.clone() for t in (self.y, g.x, g.routing_weights, g.expert_weights.gate_up,
                                    g.expert_weights.down)]

    def want(self):
        leaves = [t.detach().double().requires_grad_() for t in (
            self.x, self.weights, self.gate_up, self.down)]
        x, weights, gate_up, down = leaves
        y = reference(x, self.ids, weights, gate_up, down)
        d_x, d_weights, d_gate_up, d_down = torch.autograd.grad(y, leaves, self.d_y.double())
        return [y.detach(), d_x, d_weights, d_gate_up, d_down]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def rows_agree(got, want, limit):
    got, want = (t.double().reshape(-1, t.shape[-1]) for t in (got, want))
    norms = want.norm(dim=1)
    floor = norms.square().mean().sqrt()
    return float(((got - want).norm(dim=1) / norms.clamp(min=floor)).max()) <= limit


@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 1.2e-2), (torch.float16, 2e-3)])
def test_results_are_a_plain_loops(dtype, limit):
    step = Step(dtype)
    step.run()
    torch.cuda.synchronize()
    names = ("y", "d_x", "d_weights", "d_gate_up", "d_down")
    for name, got, want in zip(names, step.outputs(), step.want(), strict=True):
        assert rows_agree(got, want, limit), name


def test_outputs_lie_where_the_caller_said():
    step = Step()
    addresses = [step.y.data_ptr(), step.grads.x.data_ptr()]
    step.run()
    torch.cuda.synchronize()
    assert addresses == [step.y.data_ptr(), step.grads.x.data_ptr()]
    assert not any(torch.isnan(t).any() for t in step.outputs())


def test_new_outputs_are_made_beside_the_input():
    step = Step()
    step.plan.from_topk(step.ids, step.weights)
    result = step.experts.forward(step.plan, step.x, step.bound)
    grads = step.experts.backward(result, step.d_y)
    torch.cuda.synchronize()
    step.run()
    torch.cuda.synchronize()
    assert result.y.is_cuda and result.y.dtype == step.x.dtype
    assert torch.equal(result.y, step.y) and torch.equal(grads.x, step.grads.x)


def test_order_on_a_side_stream():
    """Inputs are written late on a side stream; the step queued behind them sees them."""
    step, late = Step(), Step(seed=1)
    step.run()
    torch.cuda.synchronize()
    want = step.outputs()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(5):
            late.run(stream)  # other data first
            torch.cuda._sleep(20_000_000)
            for name in ("x", "d_y", "ids", "weights", "gate_up", "down"):
                getattr(late, name).copy_(getattr(step, name))
            late.run(stream)
    stream.synchronize()
    assert same(late.outputs(), want)


def test_a_graph_of_torch_replays_the_step():
    step, eager = Step(), Step()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step.run()
    stream.synchronize()
    before = step.context.stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step.run()
    for seed in range(20):
        ids, weights = Step.routing(seed)
        if seed == 7:
            ids = torch.full_like(ids, 3)  # everything to one expert
        for one in (step, eager):
            one.ids.copy_(ids)
            one.weights.copy_(weights)
        graph.replay()
        eager.run()
        torch.cuda.synchronize()
        assert same(step.outputs(), eager.outputs()), seed
    after = step.context.stats()
    assert (after.allocs, after.host_syncs) == (before.allocs, before.host_syncs)


def test_plan_views_are_cuda_arrays():
    step = Step()
    step.run()
    step.context.sync()
    counts = torch.as_tensor(step.plan.view(moec.PlanField.COUNTS), device="cuda")
    assert torch.equal(counts.long(), torch.bincount(step.ids.flatten(), minlength=E))
    exported = torch.empty(E, dtype=torch.int32, device="cuda")
    step.plan.export(moec.PlanField.COUNTS, exported)
    torch.cuda.synchronize()
    assert torch.equal(exported, counts)
    assert step.plan.totals().routed_rows == T * K


def test_memory_of_the_wrong_device_is_refused():
    step = Step()
    with pytest.raises(moec.DeviceError, match="expert_ids is on cpu; expected cuda:0"):
        step.plan.from_topk(step.ids.cpu(), step.weights)
    step.plan.from_topk(step.ids, step.weights)
    with pytest.raises(moec.DeviceError, match="x is on cpu; expected cuda:0"):
        step.experts.forward(step.plan, step.x.cpu(), step.bound)
    with pytest.raises(moec.MoecError):
        moec.Context("cuda:99")


def test_bound_weights_keep_their_tensors_alive():
    step = Step()
    step.run()
    torch.cuda.synchronize()
    want = step.outputs()
    del step.gate_up, step.down, step.held
    gc.collect()
    trash = [torch.full((E, 2 * I, H), torch.nan, dtype=torch.bfloat16, device="cuda")
             for _ in range(8)]  # would land in their memory
    step.run()
    torch.cuda.synchronize()
    assert same(step.outputs(), want) and trash


def test_a_hundred_runs_are_the_same_bytes():
    step = Step()
    step.run()
    torch.cuda.synchronize()
    want = step.outputs()
    for _ in range(100):
        step.run()
    torch.cuda.synchronize()
    assert same(step.outputs(), want)


# Large enough for what is late once in some hundred runs to show.
@pytest.mark.parametrize("kind", ["nf4", "int4", "int8"])
def test_quantised_experts_give_the_same_bytes_each_time(kind):
    torch.manual_seed(5)
    tokens, width, experts, top_k = 300, 2880, 32, 4
    context = moec.Context("cuda")
    options = {"block_k": 32} if kind == "int4" else {}
    made = {part: moec.quantise(context, torch.randn(experts, rows, width, device="cuda",
                                                     dtype=torch.bfloat16) * width**-0.5,
                                kind, **options)
            for part, rows in (("gate_up", 2 * width), ("down", width))}
    scheme = {"nf4": moec.Scheme.CODEBOOK4}.get(kind) or getattr(moec.Scheme, kind.upper())
    bound = moec.Weights.of(context, scheme=scheme, dtype="bf16", hidden=width, inter=width,
                            gate_layout=moec.GateLayout.GATE_THEN_UP, num_experts=experts,
                            **{part: q.codes for part, q in made.items()},
                            **{f"{part}_quant": q.quant for part, q in made.items()})
    layer = moec.Experts(context, moec.ExpertsDesc(
        num_experts=experts, top_k=top_k, hidden=width, inter=width, dtype="bf16",
        save=moec.Save.PREACT))
    plan = moec.Plan(context, moec.PlanDesc(max_tokens=tokens, num_experts=experts, top_k=top_k))
    x, d_y = (torch.randn(tokens, width, device="cuda").bfloat16() for _ in range(2))
    weights, ids = torch.topk(torch.rand(tokens, experts, device="cuda"), top_k)
    ids, y, d_x = ids.to(torch.int32), torch.empty_like(x), torch.empty_like(x)
    saved = torch.empty(layer.sizes.saved.bytes(tokens), dtype=torch.uint8, device="cuda")
    grads = moec.ExpertsGradients(x=d_x, routing_weights=torch.empty_like(weights))
    stream, first, differ = torch.cuda.current_stream(), None, 0
    for _ in range(1000):
        plan.from_topk(ids, weights, stream=stream)
        result = layer.forward(plan, x, bound, out=y, saved=saved, stream=stream)
        layer.backward(result, d_y, into=grads, stream=stream)
        got = torch.stack([y, d_x])
        first = got if first is None else first
        differ += (got.view(torch.int16) != first.view(torch.int16)).any().to(torch.int64)
    assert first.isfinite().all() and first.any()
    assert int(differ) == 0


# Of a multiple of eight experts B is copied eight elements at once.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_factors_as_peft_stores_them_give_the_same_bytes(dtype):
    torch.manual_seed(6)
    tokens, width, experts, rank = 200, 192, 16, 16
    made = moec.torch.Experts(moec.ExpertsDesc(hidden=width, inter=width, num_experts=experts,
                                               top_k=4), dtype=torch.bfloat16, device="cuda")
    made.requires_grad_(False)
    made.add_adapter("lora", rank, dtype=dtype)
    x = torch.randn(tokens, width, device="cuda").bfloat16().requires_grad_()
    weights, ids = torch.topk(torch.rand(tokens, experts, device="cuda"), 4)
    factors = list(made.adapters["lora"].values())
    for factor in factors:
        torch.nn.init.normal_(factor.b, std=0.1)

    def results():
        y = made(x, ids, weights)
        leaves = [x, *(p for f in factors for p in (f.a, f.b))]
        return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    compact = results()
    for factor in factors:
        b = factor.b.detach().permute(1, 2, 0).contiguous().permute(2, 0, 1)
        assert b.stride(0) == 1
        factor.b = torch.nn.Parameter(b)
    assert all(t.any() for t in compact) and same(results(), compact)
