# SPDX-License-Identifier: Apache-2.0
"""What others do with the codes that quantised_bench.py measures. peers_of(impl, ...) names those
that this machine has packages for:

nf4_stack    bitsandbytes dequantises whole stacks, PyTorch's grouped_mm multiplies; a step keeps
             the stacks for its backward
nf4_rec      the same, and the backward dequantises them again
triton-mxfp4 triton_kernels' matmul_ogs (as of Triton 3.6), forward alone, from the top-k of logits;
             with gpt-oss's activation, the one that it has fused
"""

import importlib.util

import torch
from implementations import Case, differentiable, grouped, grouped_mm, swiglu

FEW_TOKENS = 512  # from here on triton_kernels lays scales out for 8 warps, as vLLM has it


# ---- bitsandbytes
def bnb_stack(coded, shape):
    """() -> the whole stack [E,N,K] in bf16"""
    import bitsandbytes.functional as bnb

    codes = coded.data.contiguous().view(torch.uint8).view(-1, 1)
    state = bnb.QuantState(absmax=coded.quant.scales.reshape(-1), shape=torch.Size(shape),
                           code=coded.quant.codebook, blocksize=coded.quant.block_k or 64,
                           quant_type="nf4", dtype=torch.bfloat16)
    return lambda: bnb.dequantize_4bit(codes, state)


class Rebuilt(torch.autograd.Function):
    """rows times a stack that both directions make for themselves."""

    @staticmethod
    def forward(ctx, rows, ends, stack):
        ctx.save_for_backward(ends)
        ctx.stack = stack
        return grouped_mm(rows, stack(), ends)

    @staticmethod
    def backward(ctx, d_rows):
        (ends,) = ctx.saved_tensors
        return grouped_mm(d_rows, ctx.stack().transpose(1, 2), ends), None, None


class Stacks:
    bits, modes = 4.5, ("fwd", "step")

    def __init__(self, codes, shapes, again):
        self.stacks = {part: bnb_stack(codes[part], shapes[part]) for part in codes}
        self.activation = torch.compile(swiglu, dynamic=True)
        self.again = again

    def product(self, rows, part, ends):
        if self.again:
            return Rebuilt.apply(rows, ends, self.stacks[part])
        return grouped_mm(rows, self.stacks[part](), ends)

    def case(self, p, mode):
        return differentiable(p, mode, lambda x, weights: grouped(
            x, p.ids, weights, "gate_up", "down", p.shape.experts, self.activation, self.product),
            held={})


# ---- triton_kernels
def gptoss(both, alpha=1.702, limit=7.0):
    """Of gate and up columns in turn, as triton_kernels' swiglu_fn."""
    gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


class TritonMxfp4:
    bits, modes = 4.25, ("fwd",)

    def __init__(self, codes, shapes, held):
        experts, rows, _ = shapes["gate_up"]
        def in_turn(stack):  # gate and up rows
            stack = stack.view(experts, 2, rows // 2, -1)
            return stack.transpose(1, 2).reshape(experts, rows, -1).contiguous()

        self.codes = {part: coded.data.view(torch.uint8).view(*shapes[part][:2], -1)
                      for part, coded in codes.items()}
        self.scales = {part: coded.quant.scales.view(torch.uint8).view(*shapes[part][:2], -1)
                       for part, coded in codes.items()}
        for of in (self.codes, self.scales):
            of["gate_up"] = in_turn(of["gate_up"])
        self.held = {"gate_up": in_turn(held["gate_up"]), "down": held["down"]}
        self.made = {}

    def matrices(self, warps):
        """{part: (w [E,K,N], precision)} in the layouts that the package prefers on this GPU."""
        from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
        from triton_kernels.matmul_ogs_details.opt_flags import update_opt_flags_constraints
        from triton_kernels.numerics import InFlexData
        from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
        from triton_kernels.tensor_details import layout

        update_opt_flags_constraints({"split_k": 1})
        if warps not in self.made:
            of_codes = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
            of_scales = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=warps)
            def laid_out(tensor, form, dtype=None):
                kind, options = form
                wrapped = wrap_torch_tensor(tensor.transpose(1, 2), dtype=dtype)
                return convert_layout(wrapped, kind, **options)

            self.made = {warps: {part: (
                laid_out(self.codes[part], of_codes, FP4),
                PrecisionConfig(weight_scale=laid_out(self.scales[part], of_scales),
                                flex_ctx=FlexCtx(rhs_data=InFlexData())))
                for part in self.codes}}
        return self.made[warps]

    def case(self, p, mode):
        from triton_kernels.matmul_ogs import (FnSpecs, FusedActivation, GatherIndx, RoutingData,
                                               ScatterIndx, matmul_ogs)
        from triton_kernels.swiglu import swiglu_fn
        from triton_kernels.tensor import make_ragged_tensor_metadata
        from triton_kernels.topk import topk

        parts = self.matrices(4 if p.tokens <= FEW_TOKENS else 8)
        act = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2),
                              (1.702, 7.0))
        experts, top_k, out = p.shape.experts, p.shape.top_k, {}

        def run():
            chosen = topk(p.logits, top_k)
            there, back = chosen.mask_metadata.row_sorted_indx, chosen.mask_metadata.col_sorted_indx
            ragged = make_ragged_tensor_metadata(chosen.mask_metadata.col_sum, there.shape[0])
            weights = chosen.vals.flatten()[back]
            routing = RoutingData(weights, ragged.slice_sizes, experts, top_k, ragged)
            w, precision = parts["gate_up"]
            rows = matmul_ogs(p.x, w, None, routing, gather_indx=GatherIndx(back, there),
                              precision_config=precision, fused_activation=act)
            w, precision = parts["down"]
            out["y"] = matmul_ogs(rows, w, None, routing, scatter_indx=ScatterIndx(there, back),
                                  precision_config=precision, gammas=weights).view(p.x.shape)

        return Case(run, lambda: out)

    def wanted(self, p):
        """y of the same layer by grouped_mm: its activation is not the others'."""
        held = self.held["gate_up"], self.held["down"]
        return {"y": grouped(p.x, p.ids, p.weights, *held, p.shape.experts, gptoss)}


def peers_of(impl, codes, shapes, held):
    """{name: peer} for the codes {part: Coded} of one of ours, which stand for the values held."""
    there = lambda package: importlib.util.find_spec(package) is not None  # noqa: E731
    if impl == "moec-nf4" and there("bitsandbytes"):
        return {"nf4_stack": Stacks(codes, shapes, False), "nf4_rec": Stacks(codes, shapes, True)}
    if impl == "moec-mxfp4" and there("triton_kernels"):
        return {"triton-mxfp4": TritonMxfp4(codes, shapes, held)}
    return {}
