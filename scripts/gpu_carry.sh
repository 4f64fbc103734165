#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gpu_carry.sh: build/gpu_carry, what `make test-gpu` and `make bench-gpu` need on a machine with a
# GPU but without the toolkit, or without a network: the test programs, the Python package with the
# plug-in inside, what the moec command needs beside NumPy, kernel_bench. Copy it there to the same
# place, and set MOEC_COMMIT where the repository is no checkout. About five minutes after `make
# test`, ten without. `scripts/julia.sh --pack` packs a julia.
. "$(dirname "$0")/lib.sh"

carry=$build/gpu_carry
rm -rf "$carry" "$carry.new"
site=$(scripts/gpu_package.sh)
cmake --build "$build/release" -j "$(job_count)" --target gpu_tests >&2
mkdir -p "$carry.new/bin"
bin=$build/release/bin
cp "$bin/gpu_tests.txt" "$carry.new/bin"
for program in $(cut -d' ' -f1 "$bin/gpu_tests.txt" | sort -u); do
  cp "$bin/$program" "$carry.new/bin"
done
scripts/build_gpu_bindings.sh "$carry.new/bin" >&2
find "$carry.new/bin" -type f ! -name '*.txt' ! -name 'bindings_*' -exec strip {} +
cp -r "$site" "$carry.new/site"
# Releases in pure Python, for any CPython; used where the machine has none of its own.
retry "the moec command's packages" "$venv/bin/python" -m pip install --quiet --no-compile \
  --disable-pip-version-check --target "$carry.new/tools" --only-binary :all: \
  typer==0.12.5 click==8.1.8 rich==13.9.4 >&2
cp "$(scripts/build_gpu.sh kernel_bench)" "$carry.new"
mv "$carry.new" "$carry"
du -sh "$carry"
