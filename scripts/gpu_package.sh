#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gpu_package.sh: print a folder with the Python package and the plug-in inside, for PYTHONPATH:
# build/gpu_carry/site (gpu_carry.sh) when it is there, else made now from
# build/release, which make test shares.
. "$(dirname "$0")/lib.sh"

site=$build/gpu_carry/site
if [ ! -d "$site/moec" ]; then
  site=$build/gpu_site
  scripts/bootstrap.sh test >&2
  cmake --preset release -DMOEC_CUDA=ON -DCMAKE_CUDA_COMPILER="$(scripts/cuda_toolkit.sh)" >&2
  cmake --build "$build/release" -j "$(job_count)" --target moec moec_cuda >&2
  scripts/xla_headers.sh >/dev/null
  scripts/build_wheel.sh "$build/gpu_wheel" "$build/release/lib/libmoec.so.0" >&2
  rm -rf "$site"
  python3 -m zipfile -e "$build"/gpu_wheel/moec-*.whl "$site" >&2
fi
echo "$site"
