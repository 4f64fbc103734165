#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""seeds.py [-n COUNT] [-j JOBS] [--draw N] [--build DIR] NAME...

Runs test programs on random data: COUNT seeds (100) of each program, JOBS runs at a time (1).
A NAME is a room, whose programs its tests.cmake lists (unit, layer, ...), or one program
(unit/router_test). They must be built: cmake --build build/release.

    tests/seeds.py -n 1000 unit
    tests/seeds.py -n 50 layer

Prints each seed that fails with the first lines of its failures, and a line for each program.
The exit status is 1 where any seed failed. MOEC_TEST_SEED=SEED repeats one.

The seeds are 32 random bits each, the same ones for the same --draw: neighbouring numbers would
give shifted copies of the same data (support/random.h adds a constant to its state at each step).
"""

import argparse
import os
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SKIPPED = 77  # tests/CMakeLists.txt: SKIP_RETURN_CODE


def programs(name):
    """unit -> unit/gemm_test, unit/wgrad_test, ...; a program is itself."""
    if "/" in name:
        return [name]
    listed = (TESTS / name / "tests.cmake").read_text()
    return re.findall(r"add_moec_test\(([\w/]+)", listed)


def failures(program, seed):
    """None where the seed passes, else what the program says."""
    run = subprocess.run(
        [program], env=dict(os.environ, MOEC_TEST_SEED=str(seed)), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace")
    if run.returncode in (0, SKIPPED):
        return None
    blocks = re.findall(r"^\S+: Failure\n((?:.+\n){1,3})", run.stdout, re.M)
    texts = [" | ".join(block.splitlines()) for block in blocks]
    return texts or ["exit status %d: %s" % (run.returncode, run.stdout[-300:])]


def check(pool, name, binary, seeds):
    """Prints the seeds of one program that fail; returns how many."""
    failed = 0
    for seed, texts in zip(seeds, pool.map(lambda seed: failures(binary, seed), seeds)):
        if texts is None:
            continue
        failed += 1
        print("%s MOEC_TEST_SEED=%d: %d failures" % (name, seed, len(texts)))
        for text in texts[:3]:
            print("    " + text, flush=True)
    print("%s: %d of %d seeds failed" % (name, failed, len(seeds)), flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("-n", type=int, default=100)
    parser.add_argument("-j", type=int, default=1)
    parser.add_argument("--draw", type=int, default=1)
    parser.add_argument("--build", type=Path, default=TESTS.parent / "build/release")
    parser.add_argument("name", nargs="+")
    options = parser.parse_args()
    draw = random.Random(options.draw)
    seeds = [draw.getrandbits(32) for _ in range(options.n)]
    names = [program for name in options.name for program in programs(name)]
    binaries = [options.build / "bin" / name.split("/")[-1] for name in names]
    for binary in binaries:
        if not binary.exists():
            sys.exit("%s is not built" % binary)
    with ThreadPoolExecutor(options.j) as pool:
        failed = sum(check(pool, name, binary, seeds) for name, binary in zip(names, binaries))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
