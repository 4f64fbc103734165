#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# build_wheel.sh FOLDER [PREFIX]: build the Python wheel into FOLDER, with the libmoec installed in
# PREFIX, else with one compiled from this tree. The tools are build/venv's; nothing is fetched.
. "$(dirname "$0")/lib.sh"
folder=$1 prefix=${2:-}
options=(--config-settings "build-dir=$build/python${prefix:+-installed}")
[ -z "$prefix" ] || options+=(--config-settings "cmake.define.MOEC_PYTHON_PREFIX=$prefix")
rm -rf "$folder"
mkdir -p "$build/log"
log=$build/log/wheel.txt
export CMAKE_BUILD_PARALLEL_LEVEL
CMAKE_BUILD_PARALLEL_LEVEL=$(job_count)
"$venv/bin/python" -m pip wheel --disable-pip-version-check \
  --no-deps --no-build-isolation --no-index --wheel-dir "$folder" "${options[@]}" bindings/python \
  >"$log" 2>&1 || { tail -n 40 "$log" >&2; die "the wheel does not build; see ${log#"$root"/}"; }
ls "$folder"/moec-*.whl
