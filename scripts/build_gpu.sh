#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# build_gpu.sh PROGRAM: build kernel_check, kernel_bench, small_check, small_bench or
# compare_variants and print its path. All but the last contain the CUDA kernels, not the library.
# build_gpu.sh variant NAME [TREE]: the kernels of a source tree (default: this one) as
# build/variants/NAME.so, for compare_variants, which stands beside it. Two minutes on two cores.
here=$PWD
. "$(dirname "$0")/lib.sh"

sources="sm90/row_gemm*.cu sm90/row_gemm*.cpp sm90/code_lines.cpp sm90/gate_form.cpp
  sm90/gradient_rows.cu sm90/weight_grad.cu sm90/tensor_map.cpp sm90/work_counters.cu plan/plan.cu
  plan/plan_few.cu plan/plan_groups.cu plan/plan_choice.cu plan/plan_source.cu rows/combine.cu
  few_tokens/small_up.cu few_tokens/small_down.cu few_tokens/small_gemm.cpp few_tokens/one_token.cu"
sources=$(printf 'src/backend/cuda/%s ' $sources)  # patterns of the tree's files
tree=$root folder=$build/gpu_programs program=$build/gpu_programs/${1:-} link= flags=
plain=tests/gpu/plain.cu problem="tests/gpu/experts_problem.cpp $plain" gtest="-lgtest -lgtest_main"
case ${1:-} in
  kernel_check)
    mains="tests/gpu/kernel_check.cpp tests/gpu/weight_grad_check.cpp tests/gpu/plan_check.cpp
      $problem" link=$gtest ;;
  small_check) mains="tests/gpu/small_check.cpp $problem" link=$gtest ;;
  kernel_bench | small_bench) mains="bench/gpu/$1.cu $plain" ;;
  compare_variants) mains=bench/gpu/$1.cu sources= program=$build/variants/$1 ;;
  variant)
    [ -n "${2:-}" ] || die "usage: build_gpu.sh variant NAME [TREE]"
    mains="bench/gpu/kernel_variant.cu $plain"
    program=$build/variants/$2.so folder=$build/variants/$2
    tree=$(cd "$here" && cd "${3:-$root}" && pwd)
    # Statics of templates would be one for all variants in a process.
    flags="-Xcompiler -fPIC,-fno-gnu-unique" link="-shared -Xlinker -Bsymbolic" ;;
  *) die "usage: build_gpu.sh" \
    "kernel_check|kernel_bench|small_check|small_bench|compare_variants|variant NAME [TREE]" ;;
esac
nvcc=$("$root/scripts/cuda_toolkit.sh")
mkdir -p "$folder" "${program%/*}"
compile() {
  "$nvcc" -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a --expt-relaxed-constexpr $flags \
    -Isrc -Icapi/include -Itests -c "$1" -o "$2"
}
export -f compile
export nvcc flags
cd "$tree"
steps=() objects=()
for source in $mains $sources; do
  objects+=("$folder/$(basename "${source%.*}").o")
  steps+=("$source" "${objects[-1]}")
done
printf '%s\0' "${steps[@]}" |
  xargs -0 -P "$(job_count)" -n 2 bash -c 'compile "$0" "$1"' >&2
"$nvcc" "${objects[@]}" $link -ldl -o "$program" >&2
echo "$program"
