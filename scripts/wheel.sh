#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# wheel.sh [aarch64]: the wheels that are shipped, into build/wheel: moec with the CUDA plug-in
# inside, linked by zig for glibc 2.28 (its tag says what it needs: today 2.27, for libstdc++), and
# moec-golden, the vectors of `moec check`; with aarch64 only moec, built across, into
# build/wheel-aarch64, with a plug-in where MOEC_CUDA=ON asks for it (packaged.sh). Refuses a wheel
# that needs a newer system, is too large, or holds what check_shipped.py finds.
. "$(dirname "$0")/lib.sh"
newest_glibc=28 largest=5400000  # 2.28; bytes

scripts/bootstrap.sh test >&2
scripts/xla_headers.sh >&2
MOEC_ZIG=$(scripts/zig.sh)
export MOEC_ZIG
[ $# != 0 ] || export MOEC_CUDA=ON
folder=$build/wheel${1:+-$1}
tree=$(scripts/packaged.sh "$@")
scripts/build_wheel.sh "$folder" "$tree/lib/packaged/libmoec.so.0" "$@"

wheel=$(echo "$folder"/moec-*.whl)
glibc=$(sed -nE 's/.*-manylinux_2_([0-9]+)_.*/\1/p' <<<"$wheel")
[ "${glibc:-99}" -le $newest_glibc ] ||
  die "${wheel##*/} needs a newer system than glibc 2.$newest_glibc; see build/log/wheel.txt"
bytes=$(stat -c %s "$wheel")
[ "$bytes" -le $largest ] || die "${wheel##*/} has $bytes bytes; at most $largest are allowed"
