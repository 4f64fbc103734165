# SPDX-License-Identifier: Apache-2.0
"""What is left of a layer's work on a rank when nothing is moved: the router of its own tokens, and
its experts on the rows that an ep would bring it, forward and backward."""

import moec
import moec.torch
import torch
import torch.distributed as dist
from moec.torch._engine import context_of


def of_all(own):
    """[N*T,..] of every rank's [T,..]."""
    held = own.new_empty(dist.get_world_size() * len(own), *own.shape[1:])
    dist.all_gather_into_tensor(held, own.contiguous())
    return held


class Local:
    """layers: those of this rank; routing: what moec's router gave for its tokens. run(mode) as of
    a Case. Collective to make."""

    held = None
    can_capture = True

    def __init__(self, layers, routing):
        self.ranks, stacks = layers.ranks, layers.stacks
        hidden, inter, experts, top_k = stacks.shape
        each = experts // self.ranks.size
        begin = self.ranks.rank * each
        with torch.device("meta"):
            self.experts = moec.torch.Experts(moec.ExpertsDesc(
                hidden=hidden, inter=inter, num_experts=experts, top_k=top_k, dtype="bf16",
                expert_begin=begin, expert_end=begin + each))
        for name, held in stacks.own.items():
            self.experts._parameters[name] = torch.nn.Parameter(held)
        self.router = moec.Router(context_of(layers.x.device), moec.RouterDesc(
            num_experts=experts, top_k=top_k, norm=moec.Norm.SUM, data_dtype="bf16"))
        self.x, self.gate = layers.x, stacks.gate
        ids, weights = (of_all(t) for t in (routing.expert_ids, routing.routing_weights))
        here = (ids >= begin) & (ids < begin + each)
        self.ids = torch.where(here, ids, -1)
        self.weights = weights.detach().requires_grad_()
        self.guests = of_all(layers.x).requires_grad_()
        self.d_partial = of_all(layers.d_y)
        self.leaves = [self.guests, self.weights, *self.experts.parameters()]
        self.d_weights = torch.randn_like(routing.routing_weights)
        self.d_x, self.d_gate = torch.empty_like(self.x), torch.empty_like(self.gate)

    def _route(self):
        stream = self.ranks.stream()
        logits = self.router.gate(self.x, self.gate, stream=stream)
        return logits, self.router.route(logits, stream=stream)

    def forward(self):
        self._route()
        with torch.no_grad():
            return self.experts(self.guests, self.ids, self.weights)

    def step(self):
        stream = self.ranks.stream()
        logits, routing = self._route()
        partial = self.experts(self.guests, self.ids, self.weights)
        made = torch.autograd.grad(partial, self.leaves, self.d_partial)
        d_logits = self.router.route_backward(logits, routing.expert_ids, self.d_weights,
                                              stream=stream)
        self.router.gate_backward(self.x, self.gate, d_logits, d_x=self.d_x, d_weight=self.d_gate,
                                  stream=stream)
        return partial.detach(), *made

    def run(self, mode):
        return self.forward if mode == "layer_fwd" else self.step

    def sum_over_ranks(self):
        """y of this rank's tokens: what all ranks' partial rows add up to. Collective."""
        total = self.forward().float()
        dist.all_reduce(total)
        first = self.ranks.rank * len(self.x)
        return total[first:first + len(self.x)]
