#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# bench_gpu.sh [OPTIONS of bench/gpu/layer_bench.py]: the layer beside its peers, merged into
# bench/results/<gpu>/layer.json. No options: every shape and number of tokens.
# bench_gpu.sh quantised [OPTIONS of bench/gpu/quantised_bench.py]: frozen quantised experts.
# bench_gpu.sh lora [OPTIONS of bench/gpu/lora_bench.py]: adapters; bitsandbytes is needed.
# bench_gpu.sh qlora_models [OPTIONS of bench/gpu/qlora_models_bench.py]: steps of whole models;
# PEFT and bitsandbytes are needed.
# bench_gpu.sh ep [OPTIONS of bench/gpu/ep_bench.py]: experts on all GPUs of this machine, into
# bench/results/<gpu>_x<number>/ep.json.
# bench_gpu.sh kernels [SHAPE:TOKENS...]: each kernel alone, into kernels.json.
# The python3 of the machine brings PyTorch; SonicMoE runs where it can be imported.
. "$(dirname "$0")/lib.sh"

gpus=$(nvidia-smi --query-gpu=name --format=csv,noheader) || die "no NVIDIA driver here"
gpu=$(head -n 1 <<<"$gpus")
folder=$root/bench/results/$(echo "$gpu" | sed 's/^NVIDIA //' | tr 'A-Z ' 'a-z-')
[ "${1:-}" != ep ] || folder+=_x$(wc -l <<<"$gpus")
mkdir -p "$folder"
MOEC_COMMIT=${MOEC_COMMIT:-$(git rev-parse HEAD)}
export MOEC_COMMIT

if [ "${1:-}" != kernels ]; then
  export PYTHONPATH=${MOEC_PACKAGE:-$(scripts/gpu_package.sh)}${PYTHONPATH:+:$PYTHONPATH}
  program=layer
  case "${1:-}" in quantised|lora|qlora_models|ep) program=$1; shift ;; esac
  exec python3 "$root/bench/gpu/${program}_bench.py" --out "$folder/$program.json" "$@"
fi
shift
bench=$build/gpu_carry/kernel_bench
[ -x "$bench" ] || bench=$("$root/scripts/build_gpu.sh" kernel_bench)
cublas=$(find / -name 'libcublas.so.13' -not -path '/proc/*' 2>/dev/null | head -n 1 || true)
export LD_LIBRARY_PATH=${cublas%/*}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
rows=$(mktemp)
"$bench" "$rows" "${MOEC_BENCH_WINDOW_MS:-100}" "${@:-all}"
driver=$(nvidia-smi --query-gpu=driver_version,clocks.sm,power.draw --format=csv,noheader |
  head -n 1)
{
  printf '{"machine": "%s, driver, SM clock, power after the run: %s",\n' "$gpu" "$driver"
  window=${MOEC_BENCH_WINDOW_MS:+MOEC_BENCH_WINDOW_MS=$MOEC_BENCH_WINDOW_MS }
  command="${window}scripts/bench_gpu.sh kernels${*:+ $*}"
  printf ' "commit": "%s",\n "command": "%s",\n "rows": ' "$MOEC_COMMIT" "$command"
  cat "$rows"
  printf '}\n'
} >"$folder/kernels.json"
echo "written: $folder/kernels.json"
