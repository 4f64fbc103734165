#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# build_wheel.sh FOLDER [LIBRARY [aarch64]]: build the Python wheels moec and moec-golden into
# FOLDER, with LIBRARY (a libmoec.so.0 of this tree, and the plug-in beside it), else with one
# compiled now; with the plug-in where MOEC_NVCC names a compiler. With aarch64 only moec, across.
# MOEC_ZIG links what is compiled now, if given. The tools are those of build/venv; nothing is
# fetched: moec.jax's handlers are built where xla_headers.sh has been run.
here=$PWD
. "$(dirname "$0")/lib.sh"
[ -n "${1:-}" ] || die "usage: build_wheel.sh FOLDER [LIBRARY [aarch64]]"
cd "$here"
folder=$(realpath -m "$1")
library=${2:+$(realpath -s "$2")}
processor=${3:-}
cd "$root"
options=(--config-settings "build-dir=$build/python${library:+-prebuilt}${processor:+-$processor}")
if [ -n "$processor" ]; then
  export _PYTHON_HOST_PLATFORM=linux-$processor  # the headers of this Python serve both
  options+=(--config-settings "cmake.define.CMAKE_TOOLCHAIN_FILE=$root/cmake/$processor.cmake")
fi
[ -z "$library" ] || options+=(--config-settings "cmake.define.MOEC_PYTHON_LIBRARY=$library")
headers=$(ls -d "$build"/xla_headers/*/jaxlib/include 2>/dev/null || true)
[ -z "$headers" ] || options+=(--config-settings "cmake.define.MOEC_XLA_INCLUDE=$headers")
[ -z "${MOEC_ZIG:-}" ] || options+=(--config-settings "cmake.define.MOEC_ZIG=$MOEC_ZIG")
options+=(--config-settings "cmake.define.MOEC_CUDA=${MOEC_NVCC:+ON}")
[ -z "${MOEC_NVCC:-}" ] ||
  options+=(--config-settings "cmake.define.CMAKE_CUDA_COMPILER=$MOEC_NVCC")
rm -f "$folder"/moec-*.whl "$folder"/moec_golden-*.whl
mkdir -p "$build/log"
log=$build/log/wheel.txt
export CMAKE_BUILD_PARALLEL_LEVEL
CMAKE_BUILD_PARALLEL_LEVEL=$(job_count)
build() { # build OPTIONS... PACKAGE
  "$venv/bin/python" -m pip wheel --disable-pip-version-check --no-deps --no-build-isolation \
    --no-index --wheel-dir "$folder" "$@" >>"$log" 2>&1 ||
    { tail -n 40 "$log" >&2; die "the wheel does not build; see ${log#"$root"/}"; }
}
: >"$log"
build "${options[@]}" bindings/python
[ -n "$processor" ] || build bindings/golden
wheel=$(echo "$folder"/moec-*.whl)
"$venv/bin/python" scripts/check_shipped.py "$wheel"
# The tag that its symbols allow: glibc and libstdc++ of this machine, or older.
"$venv/bin/python" -m abi3audit --strict "$wheel" >>"$log" 2>&1 ||
  die "the wheel uses what is not in the stable ABI; see ${log#"$root"/}"
tag=$("$venv/bin/auditwheel" show "$wheel" 2>>"$log" | tee -a "$log" | tr '\n' ' ' |
  sed -nE 's/.*following platform tag: "([^"]+)".*/\1/p')
"$venv/bin/python" -m wheel tags --remove \
  --platform-tag "${tag:-linux_${processor:-$(uname -m)}}" "$wheel" >>"$log"
"$venv/bin/python" scripts/shrink_wheel.py "$folder"/moec-*.whl
ls "$folder"/*.whl
