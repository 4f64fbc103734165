#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# link_packaged.sh COMPILER ARGUMENTS...: do a link of COMPILER's objects with zig, stripped, for
# glibc 2.28, so that what comes out runs on older systems than this one. libstdc++ stays shared:
# errors cross from the plug-in to the library. CMake calls it (a linker launcher).
set -euo pipefail
compiler=$1; shift
arguments=()
for argument in "$@"; do
  case $argument in
    -Wl,--exclude-libs,*) ;;  # lld has none; the version scripts hide the same
    *) arguments+=("$argument") ;;
  esac
done
# By path: zig would take -lstdc++ for its own libc++.
for library in libstdc++.so.6 libgcc_s.so.1; do
  arguments+=("$(realpath "$("$compiler" -print-file-name=$library)")")
done
ZIG_GLOBAL_CACHE_DIR=${MOEC_ZIG%/*}/cache ZIG_LOCAL_CACHE_DIR=$ZIG_GLOBAL_CACHE_DIR
export ZIG_GLOBAL_CACHE_DIR ZIG_LOCAL_CACHE_DIR
machine=$("$compiler" -dumpmachine)
cmake=${BASH_SOURCE%/*}/../cmake
exec "$MOEC_ZIG" cc -target "${machine%%-*}-linux-gnu.2.28" -fPIC -Wl,-s,--as-needed \
  -Wl,-T,"$cmake/packaged.ld" "$cmake/older_libstdcxx.c" "${arguments[@]}"
