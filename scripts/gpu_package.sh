#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gpu_package.sh: print a folder with the Python package and the plug-in inside, for PYTHONPATH:
# build/gpu_carry/site when it is there (for a machine without the toolkit), else built now.
. "$(dirname "$0")/lib.sh"

site=$build/gpu_carry/site
if [ ! -d "$site/moec" ]; then
  site=$build/gpu_site
  scripts/bootstrap.sh demo >&2
  cmake -S . -B "$build/gpu_library" -G Ninja -DMOEC_CUDA=ON -DMOEC_STATIC=OFF \
    -DCMAKE_CUDA_COMPILER="$(scripts/cuda_toolkit.sh)" >&2
  cmake --build "$build/gpu_library" -j "$(job_count)" >&2
  scripts/xla_headers.sh >/dev/null
  scripts/build_wheel.sh "$build/gpu_wheel" "$build/gpu_library/lib/libmoec.so.0" >&2
  rm -rf "$site"
  python3 -m zipfile -e "$build"/gpu_wheel/moec-*.whl "$site" >&2
fi
echo "$site"
