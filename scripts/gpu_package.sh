#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gpu_package.sh: print a folder with what the shipped wheels hold (wheel.sh), for PYTHONPATH:
# build/gpu_carry/site (gpu_carry.sh) when it is there, else made now.
. "$(dirname "$0")/lib.sh"

site=$build/gpu_carry/site
if [ ! -d "$site/moec" ]; then
  site=$build/gpu_site
  scripts/wheel.sh >&2
  rm -rf "$site"
  for wheel in "$build"/wheel/*.whl; do python3 -m zipfile -e "$wheel" "$site" >&2; done
fi
echo "$site"
