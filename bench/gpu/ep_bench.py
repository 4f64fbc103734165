# SPDX-License-Identifier: Apache-2.0
"""Experts on all GPUs of a host, a rank each, beside the link's limit and beside what others do;
merged into one file of rows.

    scripts/bench_gpu.sh ep                                what tells most comes first, in 300 s
    scripts/bench_gpu.sh ep --resume                       what had no time in calls of this commit
    scripts/bench_gpu.sh ep --case qwen3-30b:4096 --op layer --seconds 60
    scripts/bench_gpu.sh ep --case gpt-oss-120b:16,128,deepseek-v3:16
    python3 bench/gpu/ep_bench.py --device cpu --small --out FILE    that it runs

op     dispatch, combine, and both (pair); layer_fwd and layer_step of router and experts. PEER has
       parts of a pair's time as events between them say, since its steps come in turns
impl   the schemes by name; nccl: its collectives alone, captured, the fastest of two ways; torch:
       all_to_all_single of (token, slot) rows; torchtitan: those and grouped_mm, as frameworks
       train; transformers: its own all_to_all, of 5.23 and later; local: a rank's work on the same
       rows, of which none is moved; one_gpu: moec on one GPU with the tokens of all ranks, its time
       over their number, where they fit. A layer is that of AUTO; --impl names other schemes
us     of a call, of the slowest rank, in a graph where `launch` says so
limit  of dispatch and combine: the fewest bytes at the link's write rate, and one barrier kernel;
       of a layer: one_gpu's us
model  what `moec epsim` says of a scheme without a topology
blocks of PEER's kernel; of the larger one where both run

A scheme that the library refuses is named with its message, and has no row.
"""

import argparse
import datetime
import gc
import importlib
import json
import os
import pathlib
import sys
import time

import moec
import moec.shapes
import moec.torch
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import ep_goals  # noqa: E402
from ep_data import SMALL_SHAPE, Batch  # noqa: E402
from ep_layers import LIMIT, Layers, Stacks  # noqa: E402
from ep_ranks import Ranks, finish, start  # noqa: E402
from ep_transports import SCHEMES, is_right, transports  # noqa: E402

NAMES = ("qwen3-30b", "gpt-oss-120b", "deepseek-v3")
TRANSPORTS, LAYERS = ("pair", "dispatch", "combine"), ("layer_fwd", "layer_step")
# What tells most comes first, and last what may not fit in 80 GB.
ORDER = [(name, tokens, ops) for tokens, all_ops in
         ((4096, (TRANSPORTS, LAYERS)), (1024, (TRANSPORTS,)), (16384, (TRANSPORTS,)),
          (128, (TRANSPORTS,)), (16, (TRANSPORTS,)), (16384, (LAYERS,)), (1024, (LAYERS,)),
          (128, (LAYERS,)), (16, (LAYERS,)))
         for ops in all_ops for name in NAMES]
ORDER.sort(key=("deepseek-v3", 16384, LAYERS).__eq__)
SMALL_TOKENS = 24
TRANSPORT_SECONDS, ROUNDS = 0.03, 3  # of a window
LAYER_SECONDS = {True: 0.1, False: 0.2}  # of few tokens, and of more, which heat the chip
LAYER_IMPLS = ("auto", "local", "one_gpu", "torchtitan", "transformers")  # if none are named
COPIES, COPIED_TOKENS = 20, 32768  # calls in a graph: at most, and of how many tokens together


def shape_of(name, small):
    found = moec.shapes.find(name)
    return SMALL_SHAPE if small else (found.hidden, found.inter, found.experts, found.top_k)


def has_transformers():
    """Whether its expert parallelism is there."""
    try:
        importlib.import_module("transformers.distributed.expert_parallel")
    except ImportError:
        return False
    return True


class Bench:
    def __init__(self, args, ranks):
        self.args, self.ranks = args, ranks
        self.began = time.monotonic()
        self.call = datetime.datetime.now().isoformat(timespec="seconds")
        self.commit = os.environ.get("MOEC_COMMIT") or "unknown"
        self.rows, self.refused, self.wrong = {}, {}, 0
        self.machine = f"{ranks.size} ranks on a CPU, torch {torch.__version__}"
        if ranks.on_gpu:
            version = ".".join(map(str, torch.cuda.nccl.version()))
            self.machine = (f"{ranks.size} x {torch.cuda.get_device_name()}, torch "
                            f"{torch.__version__}, NCCL {version}")
        if args.out.exists():
            file = json.loads(args.out.read_text())
            if file["machine"] != self.machine:
                sys.exit(f"{args.out} is of {file['machine']}; this is {self.machine}: --out names "
                         "another file")
            self.rows = {self.key(row): row for row in file["rows"]}
        self.link, self.stacks, self.pool = None, None, None
        if "transformers" in args.layer_impl and not has_transformers():
            ranks.say("transformers is left out: 5.23 or later is needed")
            args.layer_impl = [impl for impl in args.layer_impl if impl != "transformers"]
        ranks.comm = moec.torch.comm()
        if ranks.on_gpu and not args.no_link:
            import ep_link
            self.link = ep_link.limits(ranks, TRANSPORT_SECONDS, ROUNDS)
            self.least_us = lambda num_bytes: ep_link.least_us(self.link, num_bytes)
            ranks.say(f"link: {self.link}")

    @staticmethod
    def key(row):
        return tuple(row[name] for name in ("shape", "tokens", "op", "impl"))

    def made(self, what, impl, make):
        """What `make` gives, or None where the library refuses the scheme."""
        try:
            return make()
        except moec.MoecError as error:
            if (impl, str(error)) not in self.refused:
                self.ranks.say(f"{what}: {impl} refused: {error}")
            self.refused[impl, str(error)] = True
            return None

    def wants_transformers(self, tokens):
        """Only for the tokens that goals name: it brings communicators of its own."""
        if "transformers" not in self.args.layer_impl:
            return False
        return self.args.small or tokens == ep_goals.HEADLINE_TOKENS

    def checked(self, what, error, limit=0.0):
        """Whether an error of all ranks is small enough; said and counted if not."""
        if error <= limit:
            return True
        self.ranks.say(f"{what} is WRONG: {error:.3g}; at most {limit:g} is right")
        self.wrong += 1
        return False

    def fits(self, case, op):
        """Whether one GPU has room for a call with the tokens of all ranks. Collective."""
        failed = 0
        try:
            if case:
                case.run(op)()
        except (torch.OutOfMemoryError, MemoryError):  # the latter is moec's
            failed = 1
        self.free()
        return self.ranks.most(failed) == 0

    def prepared(self, run, can_capture, copies):
        """(function, calls that it makes), as Ranks.take_turns takes it."""
        if not can_capture:
            return run, 1
        from clock import graph_of

        def calls():  # each frees what it made before the next one
            for _ in range(copies):
                run()

        return graph_of(calls, self.pool), copies

    def add(self, name, tokens, op, impl, us, spread, **values):
        row = dict(shape=name, tokens=tokens, op=op, impl=impl, us=round(us, 2), spread=spread,
                   **values, commit=self.commit, call=self.call)
        self.rows[self.key(row)] = row
        beside = f"limit {row['limit_us']:9.2f}" if row.get("limit_us") else ""
        self.ranks.say(f"{name:13} {tokens:6} {op:10} {impl:10} {us:10.2f} us {beside} "
                       f"{row.get('launch', '')} {row.get('scheme', '')}")

    # ---- rows there and back
    def transports(self, name, tokens):
        batch = Batch.drawn(self.ranks, shape_of(name, self.args.small), tokens)
        least = self.least_us(batch.least_bytes) if self.link else None
        found = {}
        for impl, ways in transports(batch).items():
            for number, make in enumerate(ways):
                if impl not in self.args.impl:
                    continue
                what = f"{name} {tokens} {impl}"
                transport = self.made(what, impl, make)
                if transport and self.checked(what, 0 if is_right(batch, transport) else 1):
                    found[impl, number] = transport, transport.extra()
        copies = max(1, min(COPIES, COPIED_TOKENS // tokens))
        best = {}
        shares = {impl: self.ranks.share(one.dispatch, one.combine, copies)
                  for (impl, _), (one, _) in found.items() if not one.can_repeat}
        for op in TRANSPORTS:
            runs = {}
            for key, (transport, _) in found.items():
                if op != "pair" and not transport.can_repeat:
                    continue
                capture = transport.can_capture and self.ranks.on_gpu
                runs[key] = self.prepared(getattr(transport, op), capture, copies)
            measured = self.ranks.take_turns(runs, self.args.window or TRANSPORT_SECONDS, ROUNDS)
            for impl, number in found.keys() - runs.keys():
                us, spread, _ = best["pair", impl]
                part = shares[impl] if op == "dispatch" else 1 - shares[impl]
                measured[impl, number] = us * part, spread
            for (impl, number), (us, spread) in measured.items():
                if (op, impl) not in best or us < best[op, impl][0]:
                    best[op, impl] = us, spread, number
            del runs
        for (op, impl), (us, spread, number) in best.items():
            transport, extra = found[impl, number]
            if blocks := extra.get("blocks"):
                extra = extra | dict(blocks=blocks.get(op, max(blocks.values())))
            if scheme := extra.get("scheme"):
                ways = TRANSPORTS[1:] if op == "pair" else [op]
                extra |= dict(model_us=round(sum(batch.model_us(scheme, o) for o in ways), 2))
            self.add(name, tokens, op, impl, us, spread, **extra, imbalance=batch.imbalance,
                     limit_us=least and round(least * (2 if op == "pair" else 1), 2),
                     launch="graph" if transport.can_capture and self.ranks.on_gpu else "eager")

    # ---- whole layers
    def layers(self, name, tokens):
        if not self.stacks or self.stacks.name != name:
            self.stacks = None
            self.free()
            self.stacks = Stacks(self.ranks, shape_of(name, self.args.small),
                                 "one_gpu" in self.args.layer_impl)
            self.stacks.name = name
        self.pool = torch.cuda.graph_pool_handle() if self.ranks.on_gpu else None
        layers, impls = Layers(self.stacks, tokens), self.args.layer_impl
        cases, extra, routing, want = {}, {}, None, None
        for impl in SCHEMES:
            what = f"{name} {tokens} layer {impl}"
            case = self.made(what, impl, lambda i=impl: layers.scheme(i)) \
                if impl in impls else None
            if not case:
                continue
            if not want:
                routing = layers.routing_of(case)
                want = layers.reference(routing.expert_ids.long())
            if self.checked(what, layers.error(case, want), LIMIT):
                cases[impl] = case
                said = case.held.describe()
                extra[impl] = dict(scheme=said["scheme"])
                if blocks := said.get("blocks"):
                    extra[impl]["blocks"] = max(blocks.values())
        if "local" in impls and routing:
            case = layers.local(routing)
            if self.checked(f"{name} {tokens} layer local", layers.error_of_local(case, want),
                            LIMIT):
                cases["local"] = case
        fitting = {}
        if "one_gpu" in impls:
            case = layers.one_gpu()
            fitting = {op: self.fits(case, op) for op in LAYERS}
            checked = next((op for op in reversed(LAYERS) if fitting[op]), None)
            error = layers.error_of_one(case, checked, want) if want and checked else 0.0
            if self.checked(f"{name} {tokens} layer one_gpu", error, LIMIT):
                cases["one_gpu"] = case
        if "torchtitan" in impls:
            cases["torchtitan"] = layers.torch_case()
        if self.wants_transformers(tokens):
            given, case = layers.transformers_cases(routing and routing.expert_ids.long())
            error = layers.error(given, want) if want else 0.0
            if self.checked(f"{name} {tokens} layer transformers", error, LIMIT):
                cases["transformers"] = case
        del want
        for op in LAYERS:
            if not fitting.get(op, True):
                self.ranks.say(f"{name} {tokens} {op}: one GPU has no room for all tokens")
                cases.pop("one_gpu", None)
            self.layer_rows(name, tokens, op, cases, extra, layers.batch.imbalance)

    def layer_rows(self, name, tokens, op, cases, extra, imbalance):
        few = tokens <= ep_goals.FEW_TOKENS
        copies = 4 if few else 1
        runs, launches = {}, {}
        for impl in sorted(cases, key="one_gpu".__ne__):  # first: its memory serves the others
            case = cases[impl]
            capture = self.ranks.on_gpu and (not case or case.can_capture)
            run = self.prepared(case.run(op), capture, copies) if case else (None, copies)
            runs[impl], launches[impl] = run, "graph" if capture else "eager"
        measured = self.ranks.take_turns(runs, self.args.window or LAYER_SECONDS[few], ROUNDS)
        part = measured["one_gpu"][0] / self.ranks.size if "one_gpu" in measured else None
        for impl, (us, spread) in measured.items():
            self.add(name, tokens, op, impl, part if impl == "one_gpu" else us, spread,
                     **extra.get(impl, {}), limit_us=part and round(part, 2),
                     imbalance=imbalance, launch=launches[impl])

    # ---- all of them
    def free(self):
        gc.collect()
        if self.ranks.on_gpu:
            torch.cuda.empty_cache()

    def has_time(self, slowest):
        """Whether another case like the slowest so far fits."""
        return self.ranks.most(time.monotonic() - self.began) + slowest < self.args.seconds

    def is_done(self, name, tokens, ops):
        """Whether a call of this commit has measured all of it."""
        return all(self.rows.get((name, tokens, op, "auto"), {}).get("commit") == self.commit
                   for op in ops)

    def run(self, cases):
        slowest = {True: 0.0, False: 0.0}
        left_out = []
        for name, tokens, ops in cases:
            is_layer = ops is LAYERS
            if self.args.resume and self.is_done(name, tokens, ops):
                continue
            if not self.has_time(slowest[is_layer]):
                left_out.append(f"{name}:{tokens}:{'layer' if is_layer else 'transport'}")
                continue
            begin = time.monotonic()
            (self.layers if is_layer else self.transports)(name, tokens)
            self.pool = None
            self.free()
            self.write()
            slowest[is_layer] = max(slowest[is_layer],
                                    self.ranks.most(time.monotonic() - begin))
        if left_out:
            self.ranks.say(f"no time for {', '.join(left_out)}")

    def write(self):
        if self.ranks.rank:
            return
        head = dict(machine=self.machine, ranks=self.ranks.size, commit=self.commit,
                    command="scripts/bench_gpu.sh ep", link=self.link,
                    top_k={name: shape_of(name, self.args.small)[3] for name in NAMES})
        rows = ",\n".join(" " + json.dumps(row) for row in self.rows.values())
        self.args.out.parent.mkdir(parents=True, exist_ok=True)
        self.args.out.write_text(
            json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + rows + "\n]}\n")


def parse_cases(text):
    """[(shape, tokens)] of SHAPE:TOKENS,..., where a shape has all that follow it."""
    found, name = [], None
    for part in text.split(","):
        *names, tokens = part.split(":")
        name = names[0] if names else name
        if name is None or len(names) > 1 or not tokens.isdecimal() or int(tokens) == 0:
            raise argparse.ArgumentTypeError(f"{part!r} in {text!r}; expected SHAPE:TOKENS")
        try:
            moec.shapes.find(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(error) from error
        found.append((name, int(tokens)))
    return found


def arguments():
    everybody = [*SCHEMES, "nccl", "torch", *LAYER_IMPLS[1:]]
    split = lambda text: text.split(",")  # noqa: E731
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", action="extend", type=parse_cases, metavar="SHAPE:TOKENS,...",
                        help="default: everything")
    parser.add_argument("--op", choices=("transport", "layer"), help="default: both")
    parser.add_argument("--impl", type=split, help=f"of {','.join(everybody)}")
    parser.add_argument("--resume", action="store_true",
                        help="leave out what --out has of this commit")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, help="default: one a GPU; two on a CPU")
    parser.add_argument("--small", action="store_true", help="a small layer in the place of each")
    parser.add_argument("--seconds", type=float, default=300, help="no case begins that exceeds it")
    parser.add_argument("--window", type=float, help="seconds of one")
    parser.add_argument("--no-link", action="store_true", help="rows have no limit")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    args.layer_impl = args.impl or (everybody if args.small else list(LAYER_IMPLS))
    args.impl = args.impl or everybody
    if unknown := set(args.impl) - set(everybody):
        parser.error(f"--impl {unknown.pop()}: one of {', '.join(everybody)} is needed")
    return args


def chosen(args):
    """(shape, tokens, ops) in their order."""
    if args.small:
        order = [(name, SMALL_TOKENS, ops) for name in NAMES[:1] for ops in (TRANSPORTS, LAYERS)]
    elif args.case:
        order = [(*case, ops) for case in args.case for ops in (TRANSPORTS, LAYERS)]
    else:
        order = ORDER
    return [case for case in order
            if not args.op or (args.op == "layer") == (case[2] is LAYERS)]


def main():
    args = arguments()
    if "RANK" not in os.environ:
        size = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 2)
        if not size:
            sys.exit("ep_bench.py: no GPU that torch sees")
        return start(size, sys.argv)
    ranks = Ranks(args.device)
    bench = Bench(args, ranks)
    bench.run(chosen(args))
    if ranks.rank == 0:
        made = ep_goals.EpRows.read(args.out)
        print("\n".join(ep_goals.summary(made, made.file["top_k"])))
        print(f"written: {args.out}; {bench.wrong} wrong", flush=True)
    ranks.wait()
    finish(int(bench.wrong > 0))


if __name__ == "__main__":
    sys.exit(main())
