# SPDX-License-Identifier: Apache-2.0
"""Time that Python takes for an MoE layer's step: tiny layers, whose products take no time.

    python3 bench/host_time.py [--device cuda] [--cases NAME ...] [--profile]

Prints microseconds of a forward and of a backward, median and least of all rounds, and how much of
it is the library's own C calls. On a GPU the clock stops when everything is queued.

qlora    experts of qwen3 in NF4, PEFT's adapters on both stacks, on moec.transformers
lora     the same in bf16
experts  moec.torch.Experts with every gradient
adapted  moec.torch.Experts in NF4 with an adapter of its own
layer    moec.torch.MoELayer with every gradient
"""

import argparse
import cProfile
import pstats
import statistics
import sys
import time

import torch

HIDDEN, EXPERTS, TOP_K, TOKENS, RANK = 64, 8, 2, 2, 4


def nf4(stack):
    import bitsandbytes.functional as functional

    from moec.torch import PackedTensor

    codes, state = functional.quantize_4bit(stack.data, blocksize=64, quant_type="nf4",
                                            compress_statistics=True)
    return PackedTensor.from_bnb(codes, state)


def routing(device):
    ids = torch.arange(TOKENS * TOP_K, device=device).reshape(TOKENS, TOP_K) % EXPERTS
    weights = torch.full((TOKENS, TOP_K), 0.5, device=device)
    return ids, weights.requires_grad_()


def of_transformers(device, is_packed):
    """The experts of a model, which PEFT wraps twice."""
    import peft
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    import moec.transformers  # noqa: F401

    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=HIDDEN, num_experts=EXPERTS,
                            num_experts_per_tok=TOP_K)
    config._experts_implementation_internal = "moec"
    outer = torch.nn.Module()
    with torch.device(device):
        outer.experts = Qwen3MoeExperts(config).bfloat16().requires_grad_(False)
    names = ["gate_up_proj", "down_proj"]
    for name in names:
        torch.nn.init.normal_(getattr(outer.experts, name), std=0.1)
        if is_packed:
            packed = nf4(getattr(outer.experts, name))
            outer.experts._parameters[name] = torch.nn.Parameter(packed, requires_grad=False)
    model = peft.inject_adapter_in_model(peft.LoraConfig(
        r=RANK, target_modules=[], target_parameters=[f"experts.{n}" for n in names]), outer)
    return model.experts.train(), routing(device)


def of_torch(device, is_packed):
    import moec

    desc = moec.ExpertsDesc(hidden=HIDDEN, inter=HIDDEN, num_experts=EXPERTS, top_k=TOP_K)
    packed = None
    if is_packed:
        drawn = {"gate_up": (EXPERTS, 2 * HIDDEN, HIDDEN), "down": (EXPERTS, HIDDEN, HIDDEN)}
        packed = {n: nf4(0.1 * torch.randn(shape, device=device, dtype=torch.bfloat16))
                  for n, shape in drawn.items()}
    experts = moec.torch.Experts(desc, dtype=torch.bfloat16, device=device, packed=packed)
    if is_packed:
        experts.add_adapter("default", RANK)
    return experts, routing(device)


def layer(device):
    import moec

    router = moec.RouterDesc(num_experts=EXPERTS, top_k=TOP_K)
    desc = moec.ExpertsDesc(hidden=HIDDEN, inter=HIDDEN, num_experts=EXPERTS, top_k=TOP_K)
    return moec.torch.MoELayer(router, desc, dtype=torch.bfloat16, device=device), ()


CASES = {
    "qlora": lambda device: of_transformers(device, True),
    "lora": lambda device: of_transformers(device, False),
    "experts": lambda device: of_torch(device, False),
    "adapted": lambda device: of_torch(device, True),
    "layer": layer,
}


class InC:
    """Seconds inside the functions of the library that compute."""

    def __init__(self):
        from moec import _raw

        self.seconds, core = 0.0, _raw._core
        for name in dir(core):
            if name.startswith("call_args_") and name.endswith(("_forward", "_backward", "_topk")):
                setattr(core, name, self.timed(getattr(core, name)))

    def timed(self, function):
        def call(*args):
            begin = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - begin
        return call


def measure(case, device, repeats, in_c, profile):
    module, more = CASES[case](device)
    x = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    wanted = [p for p in (x, *more, *module.parameters()) if p.requires_grad]
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    found = {"forward": [], "backward": [], "forward in C": [], "backward in C": []}

    def timed(name, function):
        wait()
        before, begin = in_c.seconds, time.perf_counter()
        result = function()
        found[name].append(time.perf_counter() - begin)
        found[f"{name} in C"].append(in_c.seconds - before)
        return result

    def step():
        y = timed("forward", lambda: module(x, *more))
        d_y = torch.ones_like(y)
        timed("backward", lambda: torch.autograd.grad(y, wanted, d_y))

    for _ in range(20):
        step()
    for times in found.values():
        times.clear()
    if profile:
        profile = cProfile.Profile()
        profile.runctx("for _ in range(repeats): step()", {}, locals())
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return
    for _ in range(repeats):
        step()
    shown = [f"{1e6 * of(times):6.0f}" for times in found.values()
             for of in (statistics.median, min)]
    print(f"{case:8} {'  '.join(shown)}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    import moec.torch  # noqa: F401

    in_c = InC()
    print("us, median and least: forward, backward, forward in C, backward in C")
    for case in args.cases:
        measure(case, args.device, args.repeats, in_c, args.profile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
