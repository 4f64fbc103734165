#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# bench.sh [NAME]: CPU speeds of real layer shapes beside this machine's limits, in bf16 and fp32,
# then with AVX2 alone and with the portable kernels, then one thread beside all of them and a layer
# that is nothing but overhead. oneDNN runs beside where libdnnl-dev is installed. Files go to
# build/bench, or to bench/results/NAME to be committed.
. "$(dirname "$0")/lib.sh"
scripts/bootstrap.sh test
cmake --preset release --log-level=WARNING
cmake --build "$build/release" -j "$(job_count)" --target cpu_layer
to=build/bench
[ $# = 0 ] || to=bench/results/$1
mkdir -p "$to"
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
layer() { # layer FILE [options]
  local file=$to/$1; shift
  build/release/bin/cpu_layer --shapes bench/shapes.json --commit "$commit" --out "$file" "$@"
}
small=(--model qwen3-30b --model gpt-oss-20b --tokens 1 --tokens 16 --tokens 128)
layer layer.json --dtype bf16
layer layer_f32.json --dtype f32 --model gpt-oss-20b --model olmoe-1b-7b \
  --tokens 1 --tokens 128 --tokens 2048
MOEC_CPU_ISA=avx2 layer layer_avx2.json --dtype bf16 "${small[@]}" --tokens 512
MOEC_CPU_ISA=portable layer layer_portable.json --dtype bf16 "${small[@]}"
layer threads.json --dtype bf16 --model overhead --model qwen3-30b --model gpt-oss-20b \
  --tokens 1 --tokens 512 --threads 1 --threads "$(nproc)"
