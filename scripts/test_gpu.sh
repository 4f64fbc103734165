#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_gpu.sh: the tests of the CUDA backend, on a machine with a GPU. Prebuilt programs in
# build/gpu_carry are used as they are (for a machine without the toolkit).
. "$(dirname "$0")/lib.sh"

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || die "no NVIDIA driver here"
check=$build/gpu_carry/kernel_check
[ -x "$check" ] || check=$("$root/scripts/build_gpu.sh" kernel_check)
seed=${MOEC_TEST_SEED:-$(date +%s)}  # fresh data each time; printed, so that it can be repeated
"$check" "$seed"
agree=$build/gpu_carry/backends_agree  # beside libmoec.so.0 and libmoec_cuda.so.0
if [ -x "$agree" ]; then "$agree"; fi
if sanitizer=$(command -v compute-sanitizer); then
  for tool in memcheck racecheck initcheck; do
    MOEC_CHECK_SMALL=1 "$sanitizer" --tool "$tool" --error-exitcode 9 "$check" "$seed" |
      tail -n 3
  done
fi
