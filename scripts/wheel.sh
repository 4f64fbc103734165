#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# wheel.sh: the wheels that are shipped, into build/wheel: moec with the CUDA plug-in inside, for
# glibc 2.28 and newer (zig links what g++ and nvcc compiled in build/release), and moec-golden, the
# vectors of `moec check`. Refuses a wheel that needs a newer system, is too large, or holds what
# check_shipped.py finds.
. "$(dirname "$0")/lib.sh"
newest_glibc=28 largest=7000000  # 2.28; bytes

scripts/bootstrap.sh test >&2
scripts/xla_headers.sh >&2
MOEC_ZIG=$(scripts/zig.sh)
export MOEC_ZIG
configured() { grep -qx "$1" "$build/release/CMakeCache.txt" 2>/dev/null; }
configured MOEC_CUDA:BOOL=ON && configured "MOEC_ZIG:FILEPATH=$MOEC_ZIG" ||
  cmake --preset release --log-level=WARNING -DMOEC_CUDA=ON -DMOEC_ZIG="$MOEC_ZIG" \
    -DCMAKE_CUDA_COMPILER="$(scripts/cuda_toolkit.sh)" >&2
cmake --build "$build/release" -j "$(job_count)" --target moec_packaged moec_cuda_packaged >&2
scripts/build_wheel.sh "$build/wheel" "$build/release/lib/packaged/libmoec.so.0"

wheel=$(echo "$build"/wheel/moec-*.whl)
glibc=$(sed -nE 's/.*-manylinux_2_([0-9]+)_.*/\1/p' <<<"$wheel")
[ "${glibc:-99}" -le $newest_glibc ] ||
  die "${wheel##*/} needs a newer system than glibc 2.$newest_glibc; see build/log/wheel.txt"
bytes=$(stat -c %s "$wheel")
[ "$bytes" -le $largest ] || die "${wheel##*/} has $bytes bytes; at most $largest are allowed"
