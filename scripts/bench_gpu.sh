#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# bench_gpu.sh [SHAPE:TOKENS...]: speeds of the CUDA kernels and of the layer made of them, beside
# dense batched GEMMs of cuBLAS. Writes bench/results/<gpu>/kernels.json. No arguments: all shapes.
. "$(dirname "$0")/lib.sh"

gpu=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1) || die "no NVIDIA driver here"
bench=$build/gpu_carry/kernel_bench
[ -x "$bench" ] || bench=$("$root/scripts/build_gpu.sh" kernel_bench)
folder=$root/bench/results/$(echo "$gpu" | sed 's/^NVIDIA //' | tr 'A-Z ' 'a-z-')
mkdir -p "$folder"
cublas=$(find / -name 'libcublas.so.13' -not -path '/proc/*' 2>/dev/null | head -n 1 || true)
export LD_LIBRARY_PATH=${cublas%/*}:${LD_LIBRARY_PATH:-}
rows=$(mktemp)
"$bench" "$rows" "${MOEC_BENCH_WINDOW_MS:-100}" "${@:-all}"
driver=$(nvidia-smi --query-gpu=driver_version,clocks.sm,power.draw --format=csv,noheader |
  head -n 1)
commit=${MOEC_COMMIT:-$(git rev-parse HEAD)}
{
  printf '{"machine": "%s, driver, SM clock, power after the run: %s",\n' "$gpu" "$driver"
  printf ' "commit": "%s",\n "command": "make bench-gpu",\n "rows": ' "$commit"
  cat "$rows"
  printf '}\n'
} >"$folder/kernels.json"
echo "written: $folder/kernels.json"
