# SPDX-License-Identifier: Apache-2.0
"""A layer of router and SwiGLU experts on N ranks, forward and step: moec with an ep, the same
without transport, PyTorch's all-to-all with grouped products, and moec on one GPU with the tokens
of all ranks.

A step is a forward, then the gradients of x, of the router's gate and of the experts' matrices.
"""

import functools

import moec
import moec.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ep_data import Batch, generator
from ep_local import Local, of_all
from ep_transports import Splits, scheme_ep
from problem import difference

LIMIT = 2.5e-2  # relative difference of a row from PyTorch's
MATRICES = ("gate_up", "down")


def normal(ranks, made, *size, scale=1.0):
    return torch.empty(size, dtype=torch.bfloat16, device=ranks.device).normal_(
        0, scale, generator=made)


class Stacks:
    """gate [E,H]; gate_up [e,2I,H] and down [e,H,I] of this rank's experts, of all on rank 0, where
    one GPU runs the whole layer. Each rank's part has numbers of its own."""

    def __init__(self, ranks, shape, whole):
        hidden, inter, experts, _ = shape
        self.ranks, self.shape = ranks, shape
        each = experts // ranks.size
        seeded = lambda seed: torch.Generator(ranks.device).manual_seed(seed)  # noqa: E731
        self.gate = normal(ranks, seeded(7), experts, hidden, scale=hidden**-0.5)
        holds_all = whole and ranks.rank == 0
        parts = range(ranks.size) if holds_all else [ranks.rank]
        sizes = {"gate_up": (2 * inter, hidden), "down": (hidden, inter)}
        self.all = {name: torch.empty(len(parts) * each, n, k, dtype=torch.bfloat16,
                                      device=ranks.device) for name, (n, k) in sizes.items()}
        for at, rank in enumerate(parts):
            made = seeded(100 + rank)
            for stack in self.all.values():
                stack[at * each:(at + 1) * each].normal_(0, stack.shape[2]**-0.5, generator=made)
        self.own = {name: stack[:each] for name, stack in self.all.items()}

    def module(self, stacks, ep=None):
        """moec's layer over these tensors."""
        hidden, inter, experts, top_k = self.shape
        router = moec.RouterDesc(num_experts=experts, top_k=top_k, norm=moec.Norm.SUM)
        desc = moec.ExpertsDesc(hidden=hidden, inter=inter, num_experts=experts, top_k=top_k,
                                dtype="bf16")
        with torch.device("meta"):
            made = moec.torch.MoELayer(router, desc, ep=ep)
        for name, held in {"gate_weight": self.gate, **stacks}.items():
            made._parameters[name] = torch.nn.Parameter(held)
        return made


class Case:
    """One implementation: run(mode) for "layer_fwd" and "layer_step"; what it made last."""

    def __init__(self, layer, x, d_y, leaves, can_capture, held=None):
        self.layer, self.d_y, self.can_capture, self.held = layer, d_y, can_capture, held
        self.x = x.detach().requires_grad_()
        self.leaves = [self.x, *leaves]

    def forward(self):
        with torch.no_grad():
            return self.layer(self.x)

    def step(self):
        y = self.layer(self.x)
        return y.detach(), *torch.autograd.grad(y, self.leaves, self.d_y)

    def run(self, mode):
        return self.forward if mode == "layer_fwd" else self.step


# ---- torch.distributed's all-to-all and grouped products
class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.sent, ctx.received = sent, received
        came = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(came, rows.contiguous(), received, sent)
        return came

    @staticmethod
    def backward(ctx, d_came):
        return _Exchange.apply(d_came, ctx.received, ctx.sent), None, None


def swiglu(both):
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


@functools.cache
def compiled_swiglu():
    return torch.compile(swiglu, dynamic=True)


def routing(x, gate, top_k, ids):
    """(ids, weights). ids: those that another implementation chose, whose ties fell otherwise."""
    scores = F.linear(x, gate).float().softmax(-1)
    chosen = scores.topk(top_k)[1] if ids is None else ids
    weights = scores.gather(1, chosen)
    return chosen, (weights / weights.sum(1, keepdim=True)).to(x.dtype)


def torch_layer(stacks, activation, ids=None):
    size, (_, _, experts, top_k) = stacks.ranks.size, stacks.shape

    def layer(x, gate, gate_up, down):
        chosen, weights = routing(x, gate, top_k, ids)
        splits = Splits(chosen, experts, size)
        rows = _Exchange.apply(x[splits.order // top_k], splits.sent, splits.received)
        both = F.grouped_mm(rows[splits.by_expert], gate_up.transpose(1, 2), offs=splits.ends)
        out = F.grouped_mm(activation(both), down.transpose(1, 2), offs=splits.ends)
        home = _Exchange.apply(out[splits.inverse(splits.by_expert)], splits.received, splits.sent)
        rows = home[splits.inverse(splits.order)].view(len(x), top_k, -1)
        return (rows * weights[..., None]).sum(1)
    return layer


# ---- transformers' own expert parallelism, 5.23 and later
def transformers_layer(stacks):
    """(layer(x, ids), its leaves): AllToAllEP around Qwen3-MoE's experts by grouped_mm."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import Qwen3MoeConfig
    from transformers.distributed.expert_parallel import AllToAllEP
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    size, (hidden, inter, experts, top_k) = stacks.ranks.size, stacks.shape
    config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=inter, hidden_act="silu",
                            num_experts=experts // size, num_experts_per_tok=top_k)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    for name in MATRICES:
        module._parameters[f"{name}_proj"] = torch.nn.Parameter(stacks.own[name])
    mesh = init_device_mesh(stacks.ranks.device.type, (size, 1), mesh_dim_names=("ep", "tp"))
    experts_of_all = AllToAllEP(module, mesh["ep"], mesh["tp"])
    gate = stacks.gate.detach().requires_grad_()

    def layer(x, ids=None):
        return experts_of_all(x, *routing(x, gate, top_k, ids))
    return layer, [gate, *module.parameters()]


class Layers:
    """Everybody's layer for T tokens of this rank."""

    def __init__(self, stacks, tokens):
        self.ranks, self.stacks = stacks.ranks, stacks
        made = generator(self.ranks, 1 + tokens)
        self.x, self.d_y = (normal(self.ranks, made, tokens, stacks.shape[0]) for _ in range(2))
        self.batch = Batch(self.ranks, stacks.shape, self.x, F.linear(self.x, stacks.gate))

    def scheme(self, scheme):
        ep = scheme_ep(self.batch, scheme)
        layer = self.stacks.module(self.stacks.own, ep)
        leaves = [layer.gate_weight, *(getattr(layer, name) for name in MATRICES)]
        can_capture = self.ranks.on_gpu and ep.scheme != moec.EpScheme.EXACT
        return Case(layer, self.x, self.d_y, leaves, can_capture, ep)

    def torch_case(self, ids=None):
        leaves = [self.stacks.gate.detach().requires_grad_(),
                  *(self.stacks.own[name].detach().requires_grad_() for name in MATRICES)]
        activation = compiled_swiglu() if self.ranks.on_gpu and ids is None else swiglu
        layer = torch_layer(self.stacks, activation, ids)
        return Case(lambda x: layer(x, *leaves), self.x, self.d_y, leaves, False)

    def transformers_cases(self, ids):
        """With these ids, and with its own."""
        layer, leaves = transformers_layer(self.stacks)
        return [Case(made, self.x, self.d_y, leaves, False)
                for made in (functools.partial(layer, ids=ids), layer)]

    def one_gpu(self):
        """All ranks' tokens on rank 0; None on the others. Collective."""
        everything = [of_all(own) for own in (self.x, self.d_y)]
        if self.ranks.rank:
            return None
        layer = self.stacks.module(self.stacks.all)
        leaves = [layer.gate_weight, *(getattr(layer, name) for name in MATRICES)]
        return Case(layer, *everything, leaves, self.ranks.on_gpu)

    def routing_of(self, case):
        """What moec's router gives for this rank's tokens."""
        with torch.no_grad():
            return case.layer.route(self.x)[1]

    def local(self, routing):
        return Local(self, routing)

    def error_of_local(self, case, want):
        """As error(), of y alone."""
        return self.ranks.most(difference(case.sum_over_ranks(), want[0]))

    def reference(self, ids):
        return sampled(self.torch_case(ids).step())

    def error(self, case, want):
        """The worst row's difference from PyTorch's, of y, d_x and three experts' gradients. Those
        of the gate are sums that cancel."""
        found = max(difference(got, right) for got, right in
                    zip(sampled(case.step()), want, strict=True))
        return self.ranks.most(found)

    def error_of_one(self, case, op, want):
        """As error(), of rank 0's tokens: y, and d_x of a step."""
        if case is None:
            return self.ranks.most(0)
        made = case.run(op)()
        made = made[:2] if op == "layer_step" else [made]
        return self.ranks.most(max(difference(got[:len(self.x)], right)
                                   for got, right in zip(made, want)))


def sampled(results):
    y, d_x, _, *stacks = results
    return [y, d_x, *(t[::max(1, len(t) // 3)][:3].clone() for t in stacks)]
