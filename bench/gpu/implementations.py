# SPDX-License-Identifier: Apache-2.0
"""One experts layer from top-k ids and weights, by several implementations on the same data.

Each function returns a Case for a problem and a mode: "fwd" is plan, experts, combine; "fwdbwd" the
same with pre-activations kept, then d_x, dW1, dW2 (bf16, overwritten) and d(routing weights).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import moec
import torch
import torch.nn.functional as F
from problem import normal

MIB = 1 << 20


@dataclass
class Case:
    run: Callable[[], Any]
    results: Callable[[], dict[str, torch.Tensor]] | None = None
    """After a run: y, and with a backward d_x, d_weights, d_w1 [E,2I,H], d_w2 [E,H,I]"""
    saved_mib: float | None = None
    can_capture: bool = True
    error: float | None = None
    workspace_mib: float | None = None


# ---- moec
class Moec:
    """Bound weights with one plan object and the layer's objects, for any number of tokens. held:
    the arrays whose gradients a step writes; without them the weights are frozen."""

    def __init__(self, context, shape, bound, max_tokens, held=None):
        h, i, e, k = self.shape = shape
        self.bound, self.held = bound, held
        self.plan = moec.Plan(context, self._plan_desc(max_tokens))
        desc = dict(num_experts=e, top_k=k, hidden=h, inter=i, dtype="bf16")
        self.forward = moec.Experts(context, moec.ExpertsDesc(**desc))
        self.step = moec.Experts(context, moec.ExpertsDesc(**desc, save=moec.Save.PREACT))

    @classmethod
    def of(cls, matrices, max_tokens):
        """Of plain weights, in a context of its own."""
        h, i, e, _ = matrices.shape
        context = moec.Context("cuda")
        form = moec.WeightsDesc(num_experts=e, hidden=h, inter=i,
                                gate_layout=moec.GateLayout.GATE_THEN_UP, dtype="bf16")
        held = moec.WeightSet(gate_up=matrices.w1, down=matrices.w2)
        return cls(context, matrices.shape, moec.Weights(context, form, held), max_tokens, held)

    def _plan_desc(self, tokens):
        return moec.PlanDesc(max_tokens=tokens, num_experts=self.shape.experts,
                             top_k=self.shape.top_k)

    def build_plan(self, p):
        self.plan.from_topk(p.ids, p.weights, stream=torch.cuda.current_stream())

    def case(self, p, mode):
        is_step = mode != "fwd"
        experts = self.step if is_step else self.forward
        y = torch.empty_like(p.x)
        memory = lambda size: torch.empty(  # noqa: E731
            max(size.bytes(p.tokens), 1), dtype=torch.uint8, device="cuda")
        work = memory(experts.sizes.forward_workspace)
        saved = back_work = grads = None
        if is_step:
            saved, back_work = memory(experts.sizes.saved), memory(experts.sizes.backward_workspace)
            grads = moec.ExpertsGradients(x=torch.empty_like(p.x),
                                          routing_weights=torch.empty_like(p.weights))
            if self.held:
                grads.expert_weights = self.held.empty_like()

        def run():
            stream = torch.cuda.current_stream()
            self.plan.from_topk(p.ids, p.weights, stream=stream)
            result = experts.forward(self.plan, p.x, self.bound, out=y, saved=saved,
                                     workspace=work, stream=stream)
            if is_step:
                experts.backward(result, p.d_y, into=grads, workspace=back_work, stream=stream)

        def results():
            made = {"y": y}
            if is_step:
                made |= {"d_x": grads.x, "d_weights": grads.routing_weights}
            if is_step and self.held:
                made |= {"d_w1": grads.expert_weights.gate_up, "d_w2": grads.expert_weights.down}
            return made

        plan_bytes = moec.plan_size(self._plan_desc(p.tokens))[0]
        kept = saved.numel() + plan_bytes if is_step else 0
        largest = max(work.numel(), back_work.numel() if is_step else 0)
        return Case(run, results, kept / MIB if is_step else None, workspace_mib=largest / MIB)


# ---- two dense batched products, equal counts
def cublas_bmm_bound(p, mode):
    """The FLOPs of a forward with every expert's rows side by side already: no plan, no gather, no
    activation, no combine."""
    h, i, e, k = p.shape
    rows = p.tokens * k // e
    if rows < 8 or mode != "fwd":
        return None
    x, act = normal(e, rows, h), normal(e, rows, i)
    pre, out = x.new_empty(e, rows, 2 * i), torch.empty_like(x)
    w1, w2 = p.w1.transpose(1, 2), p.w2.transpose(1, 2)

    def run():
        torch.bmm(x, w1, out=pre)
        torch.bmm(act, w2, out=out)

    return Case(run)


# ---- PyTorch
def swiglu(both):
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def grouped_mm(rows, w, ends):
    mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return mm(rows, w.transpose(-2, -1), offs=ends)


def grouped(x, ids, weights, w1, w2, experts, activation, product=grouped_mm):
    """Sort, gather, product, activation, product, weight, inverse gather, sum. product(rows, w1 or
    w2, ends of the experts' rows)"""
    tokens, slots = ids.shape
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=x.device)
    counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
    counts.index_add_(0, flat, torch.ones_like(flat, dtype=counts.dtype))
    ends = counts.cumsum(0, dtype=torch.int32)
    both = product(x[order // slots], w1, ends)
    rows = product(activation(both), w2, ends)
    rows = rows * weights.reshape(-1)[order, None].to(rows.dtype)
    return rows[inverse].view(tokens, slots, -1).sum(1)


def differentiable(p, mode, layer, held=None, can_capture=True):
    """Case of layer(x, weights, *held) -> y, differentiated by torch's tape. held: {name: matrices
    whose gradient a step needs}; default: w1 and w2 of p."""
    held = {"w1": p.w1, "w2": p.w2} if held is None else held
    if mode == "fwd":
        out = {}

        def forward():
            with torch.no_grad():
                out["y"] = layer(p.x, p.weights, *held.values())

        return Case(forward, lambda: out, can_capture=can_capture)
    names = ("d_x", "d_weights", *(f"d_{name}" for name in held))
    leaves = [t.detach().requires_grad_() for t in (p.x, p.weights, *held.values())]
    out = {}

    def step():
        out.clear()  # gradients are new tensors: give the last ones back
        y = layer(*leaves)
        out.update(zip(names, torch.autograd.grad(y, leaves, p.d_y)), y=y.detach())

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = layer(*leaves)
    saved = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
    del y
    return Case(step, lambda: out, saved / MIB, can_capture=False)


def torch_grouped(p, mode):
    compiled = torch.compile(swiglu, dynamic=True)
    return differentiable(p, mode, lambda x, weights, w1, w2: grouped(
        x, p.ids, weights, w1, w2, p.shape.experts, compiled))


def reference(p, mode):
    """The same without a compiler, to check everybody's results."""
    return differentiable(p, mode, lambda x, weights, w1, w2: grouped(
        x, p.ids, weights, w1, w2, p.shape.experts, swiglu))


def hf_eager(p, mode):
    """Hugging Face's loop over the experts hit."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    h, i, e, k = p.shape
    config = Qwen3MoeConfig(hidden_size=h, moe_intermediate_size=i, num_experts=e,
                            num_experts_per_tok=k, hidden_act="silu")
    config._experts_implementation = "eager"
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    ids = p.ids.long()

    def layer(x, weights, w1, w2):
        held = {"gate_up_proj": w1, "down_proj": w2}
        return torch.func.functional_call(experts, held, (x, ids, weights.to(x.dtype)))

    return differentiable(p, mode, layer, can_capture=False)


# ---- SonicMoE, where its package can be imported
def sonic_plan(p):
    from sonic_moe.functional import TC_topk_router_metadata_triton

    rows, e = p.ids.numel(), p.shape.experts
    ints = lambda count: torch.empty(count, dtype=torch.int32, device="cuda")  # noqa: E731
    gather, scatter, reverse = (torch.zeros_like(p.ids).view(rows) for _ in range(3))
    counts, offsets = ints(e), ints(e + 1)
    TC_topk_router_metadata_triton(p.ids, e, counts, offsets, gather, scatter, reverse)
    return offsets, gather, scatter, reverse


def sonicmoe(p, mode):
    """From the same ids and weights; its layout of w1 has gate and up rows in turn."""
    from sonic_moe.enums import ActivationType
    from sonic_moe.functional import _DownProjection, _UpProjection

    h, i, e, k = p.shape
    infer = mode == "fwd"
    kind = ActivationType.SWIGLU
    turns = p.w1.view(e, 2, i, h).transpose(1, 2).reshape(e, 2 * i, h).contiguous()

    def layer(x, weights, w1, w2):
        offsets, gather, scatter, reverse = sonic_plan(p)
        maps = (gather, scatter, reverse)
        act, pre = _UpProjection.apply(x, w1.permute(1, 2, 0), None, offsets, p.tokens * k, k,
                                       *maps, None, False, kind, infer, False)
        return _DownProjection.apply(act, pre, w2.permute(1, 2, 0), None, weights, offsets,
                                     p.tokens, k, *maps, None, False, kind)

    made = differentiable(p, mode, layer, {"w1": turns, "w2": p.w2}, can_capture=infer)
    if not infer:
        plain = made.results
        made.results = lambda: plain() | {
            "d_w1": plain()["d_w1"].view(e, i, 2, h).transpose(1, 2).reshape(e, 2 * i, h)}
    return made


PEERS = {"cublas_bmm_bound": cublas_bmm_bound, "torch_grouped": torch_grouped,
         "sonicmoe": sonicmoe, "hf_eager": hf_eager}
