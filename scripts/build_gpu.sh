#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# build_gpu.sh PROGRAM: build kernel_check, kernel_bench, small_check or small_bench and print its
# path. They contain the CUDA kernels, not the library.
. "$(dirname "$0")/lib.sh"

case ${1:-} in
  kernel_check | small_check) main=tests/gpu/$1.cu ;;
  kernel_bench | small_bench) main=bench/gpu/$1.cu ;;
  *) die "usage: build_gpu.sh kernel_check|kernel_bench|small_check|small_bench" ;;
esac
nvcc=$("$root/scripts/cuda_toolkit.sh")
folder=$build/gpu_programs
mkdir -p "$folder"
sources="row_gemm_up.cu row_gemm_up_pairs.cu row_gemm_down.cu row_gemm_grad_down.cu
  weight_grad.cu plan.cu plan_few.cu plan_groups.cu plan_choice.cu plan_source.cu
  combine.cu row_gemm.cpp tensor_map.cpp small_up.cu small_down.cu small_gemm.cpp
  one_token.cu work_counters.cu"
compile() {
  "$nvcc" -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a --expt-relaxed-constexpr \
    -Isrc -Icapi/include -Itests -c "$1" -o "$2"
}
export -f compile
export nvcc
for source in $sources; do echo "src/backend/cuda/$source $folder/${source%.*}.o"; done |
  cat - <(echo "$main $folder/$1.o") | xargs -P "$(job_count)" -L 1 bash -c 'compile "$0" "$1"' >&2
objects=$(for source in $sources; do echo "$folder/${source%.*}.o"; done)
"$nvcc" "$folder/$1.o" $objects -ldl -o "$folder/$1" >&2
echo "$folder/$1"
