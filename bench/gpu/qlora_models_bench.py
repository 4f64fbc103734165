# SPDX-License-Identifier: Apache-2.0
"""A fine-tuning step of the first layers of published models: LoRA of rank 16 on every expert and
on attention, moec beside what transformers, PEFT and bitsandbytes do; merged into one file of rows.

    scripts/bench_gpu.sh qlora_models                    every model, every way
    python3 bench/gpu/qlora_models_bench.py --device cpu --small --out FILE    that it runs

moec        experts in NF4, moec's operators, adapters as terms of the products
moec-dense  experts in bf16, moec's operators and adapters
dense       experts in bf16, transformers' grouped_mm, PEFT's own adapters
nf4         experts in NF4 by bitsandbytes' parametrisation, grouped_mm, PEFT's own adapters. PEFT
            from 0.19 on leaves adapters out there: --nf4-peft names a folder with PEFT 0.18.1

Each case is a process: its peak of memory is that process's. In each of the rounds the processes of
a model import side by side, then take turns; ms is the median of the rounds' medians. AdamW on the
adapters, random weights. The file is written after each model of each round. The program fails
where a process does, where experts of the same values give other losses or gradients, or where an
adapter has no gradient.
"""

import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

RANK = 16
MODELS = {
    "qwen3-30b": ("Qwen3MoeConfig", "sdpa", dict(
        num_experts=128, num_experts_per_tok=8, hidden_size=2048, intermediate_size=6144,
        moe_intermediate_size=768, num_attention_heads=32, num_key_value_heads=4, head_dim=128)),
    "gpt-oss-20b": ("GptOssConfig", "eager", dict(
        num_local_experts=32, num_experts_per_tok=4, hidden_size=2880, intermediate_size=2880,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64)),
}
SMALL = dict(num_experts=8, num_local_experts=8, num_experts_per_tok=2, hidden_size=64,
             intermediate_size=64, moe_intermediate_size=64, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, num_hidden_layers=2, vocab_size=96)
WAYS = ("moec", "moec-dense", "dense", "nf4")
WARM, STEPS = 6, 12
CASE_S = 90
"""A process that takes longer has failed."""
PAIRS = (("moec-dense", "dense"), ("moec", "nf4"))
"""Ways whose experts have the same values: their first losses agree to LOSS of it. In the first
pair PEFT is the same, too: gradients' norms agree to NORM."""
LOSS, NORM = 2e-3, 2e-2


# ---- one case, in a process of its own
def build(args):
    import torch
    import transformers

    kind, attention, sizes = MODELS[args.model]
    sizes = dict(num_hidden_layers=4, vocab_size=32000) | sizes | (SMALL if args.small else {})
    config = getattr(transformers, kind)(pad_token_id=0, use_cache=False, **sizes)
    way = "moec" if args.way.startswith("moec") else "grouped_mm"
    torch.manual_seed(0)
    with torch.device(args.device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation=way,
            attn_implementation=attention)
    return model.requires_grad_(False)


def quantise(model, way):
    """NF4 with double quantisation in the place of each stack, one after the other."""
    import bitsandbytes.functional as functional
    import torch
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    for module in model.modules():
        if not hasattr(module, "_apply_gate"):
            continue
        for name in ("gate_up_proj", "down_proj"):
            if way == "nf4":
                replace_parameter_4bit(module, name, compress_statistics=True, quant_type="nf4")
                continue
            from moec.torch import PackedTensor

            codes, state = functional.quantize_4bit(
                getattr(module, name).data, blocksize=64, quant_type="nf4",
                compress_statistics=True)
            packed = PackedTensor.from_bnb(codes, state, in_out=bool(module.is_transposed))
            module._parameters[name] = torch.nn.Parameter(packed, requires_grad=False)


def run_case(args):
    """Prints "ready", waits for a line, and prints the row of the case."""
    import bitsandbytes.nn.parametrize  # noqa: F401
    import peft
    import torch
    import transformers

    getattr(transformers, MODELS[args.model][0])
    if args.way.startswith("moec"):
        import moec.transformers  # noqa: F401

    print("ready", flush=True)
    sys.stdin.readline()
    on_gpu = args.device == "cuda"
    model = build(args)
    if args.way in ("moec", "nf4"):
        quantise(model, args.way)
    if on_gpu:
        torch.cuda.empty_cache()
    shape = (2, 16) if args.small else (2, 2048)
    ids = torch.randint(1, model.config.vocab_size, shape, device=args.device)
    resident = torch.cuda.memory_allocated() if on_gpu else 0
    names = [f"{path}.{leaf}" for path, module in model.named_modules()
             if hasattr(module, "_apply_gate") for leaf in ("gate_up_proj", "down_proj")]
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=["q_proj", "v_proj"], target_parameters=names))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-4)
    model.train()

    norms = []

    def step(look):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if look:
            norms.append([0.0 if p.grad is None else p.grad.float().norm().item()
                          for p in trained])
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return loss

    def timed(look=False):
        if on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = step(look)
        if on_gpu:
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin), loss.item()

    losses = [timed(look=True)[1] for _ in range(WARM)]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = [timed()[0] for _ in range(STEPS)]
    ms = statistics.median(times)
    print(json.dumps(dict(
        model=args.model, impl=args.way, ms=round(ms, 3),
        spread=round((max(times) - min(times)) / ms, 3), resident_mib=round(resident / 2**20),
        peak_mib=round(torch.cuda.max_memory_allocated() / 2**20) if on_gpu else None,
        losses=[round(loss, 4) for loss in losses],
        norm=sum(norm**2 for norm in norms[0])**0.5,
        without_gradient=sum(not norm > 0 for norm in norms[-1]), peft=peft.__version__,
        trained=sum(p.numel() for p in trained))))


# ---- all of them
def start(args, model, way):
    """The process of a case, which waits for its turn."""
    command = [sys.executable, __file__, "--way", way, "--model", model, "--device", args.device,
               "--out", str(args.out), *(["--small"] if args.small else [])]
    paths = [str(args.nf4_peft)] if way == "nf4" and args.nf4_peft else []
    path = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process, what):
    """The row of a process, which runs now, or None where it failed."""
    try:
        said, errors = process.communicate("go\n", CASE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        said, errors = process.communicate()
    if process.returncode:
        print(f"{what}: exit status {process.returncode}: {errors[-800:]}", flush=True)
        return None
    return json.loads(said.strip().splitlines()[-1])


def take_turns(args, model, ways):
    """{way: its row, or None where it failed}"""
    waiting = {way: start(args, model, way) for way in ways}
    for process in waiting.values():
        process.stdout.readline()
    return {way: finish(process, f"{model} {way}") for way, process in waiting.items()}


def wrong(rows):
    """What is wrong with the rows of a model; nothing when all is well."""
    said = [f"{way}: {row['without_gradient']} parameters of adapters have no gradient"
            for way, row in rows.items() if row["without_gradient"]]
    for ours, theirs in PAIRS:
        if ours not in rows or theirs not in rows:
            continue
        compared = [("loss", LOSS, [rows[way]["losses"][0] for way in (ours, theirs)])]
        if theirs == "dense":
            compared.append(("norm", NORM, [rows[way]["norm"] for way in (ours, theirs)]))
        for what, bound, (got, want) in compared:
            if not abs(got - want) <= bound * abs(want):
                said.append(f"{what} of {ours} is {got:.5g}, of {theirs} {want:.5g}")
    return said


def write(args, rows, commit):
    import torch

    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(dict(
        machine=f"{device}, torch {torch.__version__}", commit=commit,
        command="scripts/bench_gpu.sh qlora_models", rank=RANK, rows=rows), indent=1) + "\n")


def run_all(args):
    commit = os.environ.get("MOEC_COMMIT") or "unknown"
    call = datetime.datetime.now().isoformat(timespec="seconds")
    held = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    rows = {(row["model"], row["impl"]): row for row in held}
    ways = [way for way in args.ways if way != "nf4" or args.nf4_peft]
    found = {model: {way: [] for way in ways} for model in args.models}
    failed = 0
    for model in args.models * args.rounds:
        for way, row in take_turns(args, model, ways).items():
            failed += row is None
            found[model][way] += [row] if row else []
        taken = {way: some for way, some in found[model].items() if some}
        times = {way: statistics.median(r["ms"] for r in some) for way, some in taken.items()}
        for way, some in taken.items():
            row = some[0] | dict(ms=times[way], beside=times, commit=commit, call=call)
            row["spread"] = max(r["spread"] for r in some)
            row["rounds"] = [r["ms"] for r in some]
            rows[model, way] = row
            print(f"{model:12} {way:10} {row['ms']:8.2f} ms, peak {row['peak_mib']} MiB, resident "
                  f"{row['resident_mib']} MiB, losses {row['losses']}, PEFT {row['peft']}",
                  flush=True)
        for text in wrong({way: some[-1] for way, some in taken.items()}):
            failed += 1
            print(f"{model}: {text}", flush=True)
        write(args, list(rows.values()), commit)
    if not args.nf4_peft:
        print("nf4 is left out: --nf4-peft names no folder with PEFT 0.18.1")
    print(f"written: {args.out}; {failed} failed")
    return int(failed > 0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--nf4-peft", type=pathlib.Path, help="a folder with PEFT 0.18.1")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small layers in the place of each")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--way", choices=WAYS, help="of one case, whose row is printed")
    parser.add_argument("--model", choices=MODELS, help="of one case")
    args = parser.parse_args()
    if args.way:
        run_case(args)
        return 0
    return run_all(args)


if __name__ == "__main__":
    sys.exit(main())
