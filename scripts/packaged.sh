#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# packaged.sh [aarch64]: the libraries that packages, wheels and Go's module carry, linked by zig
# for glibc 2.28: lib/packaged of build/release, or of build/aarch64, which is built across. The
# CUDA plug-in is one of them with MOEC_CUDA=ON in the environment, which configures that folder so,
# and wherever it was configured so before; one that was built before it was configured otherwise is
# removed. Prints the folder; what is built there is not compiled again.
. "$(dirname "$0")/lib.sh"
preset=${1:-release}
options=()
zig=$(scripts/zig.sh)
[ "$(cached "$preset" MOEC_ZIG)" = "$zig" ] || options+=(-DMOEC_ZIG="$zig")
if [ "${MOEC_CUDA:-}" = ON ] && [ "$(cached "$preset" MOEC_CUDA)" != ON ]; then
  nvcc=$(scripts/cuda_toolkit.sh "$@")
  options+=(-DMOEC_CUDA=ON -DCMAKE_CUDA_COMPILER="$nvcc")
fi
[ ${#options[@]} = 0 ] || cmake --preset "$preset" --log-level=WARNING "${options[@]}" >&2
targets=(moec moec_static moec_packaged)
if [ "$(cached "$preset" MOEC_CUDA)" = ON ]; then
  targets+=(moec_cuda_packaged)
else
  rm -f "$build/$preset"/lib/packaged/libmoec_cuda.so*
fi
cmake --build "$build/$preset" -j "$(job_count)" --target "${targets[@]}" >&2
echo "$build/$preset"
