#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# cuda_toolkit.sh [aarch64]: print the nvcc to build the CUDA plug-in with: CUDA_HOME's or PATH's
# when it is CUDA 13 or later, else that of a pinned set of packages put into build/cuda (1.1 GB,
# once). With aarch64 it is one that has the libraries of that processor in targets/sbsa-linux: a
# system's, else that set again in build/cuda-aarch64, its files shared with build/cuda.
. "$(dirname "$0")/lib.sh"
across=${1:-} target=targets/sbsa-linux

# All six are pinned: left alone they resolve to releases that do not fit each other.
pins="nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cublas==13.1.0.3"
home=$build/cuda/nvidia/cu13

major() { "$1" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\)\..*/\1/p'; }

for nvcc in "${CUDA_HOME:+$CUDA_HOME/bin/nvcc}" "$(command -v nvcc || true)"; do
  [ -x "$nvcc" ] && [ "$(major "$nvcc")" -ge 13 ] || continue
  [ -z "$across" ] || [ -e "${nvcc%/bin/nvcc}/$target/lib/libcudart_static.a" ] || continue
  echo "$nvcc"
  exit 0
done

stamp=$(echo $pins)
if [ "$(cat "$build/cuda/.stamp" 2>/dev/null)" != "$stamp" ]; then
  echo "fetching the CUDA 13.0 compiler and libraries into build/cuda" >&2
  python=$venv/bin/python
  [ -x "$python" ] || python=python3
  "$python" -m pip --version >/dev/null 2>&1 || die "$python has no pip; install python3-pip"
  rm -rf "$build/cuda"
  retry "CUDA 13.0 ($stamp)" "$python" -m pip install --disable-pip-version-check \
    --no-deps --target "$build/cuda" $pins
  ln -sfn lib "$home/lib64"  # where nvcc.profile looks
  for library in "$home"/lib/lib*.so.13; do  # the packages carry the run-time names only
    ln -sfn "${library##*/}" "${library%.13}"
  done
  echo "$stamp" >"$build/cuda/.stamp"
fi
if [ -z "$across" ]; then echo "$home/bin/nvcc"; exit 0; fi

both=$build/cuda-aarch64
if [ "$(cat "$both/.stamp" 2>/dev/null)" != "$stamp" ]; then
  rm -rf "$both"
  cp -al "$home" "$both"
  retry "CUDA 13.0 of aarch64" "$venv/bin/python" -m pip install --disable-pip-version-check \
    --no-deps --target "$both/fetched" --only-binary :all: --platform manylinux_2_17_aarch64 \
    "$(grep -o 'nvidia-cuda-runtime==[0-9.]*' <<<"$pins")" >&2
  mkdir -p "$both/targets/x86_64-linux" "$both/$target"
  ln -s ../../lib "$both/targets/x86_64-linux/lib"
  mv "$both/fetched/nvidia/cu13/lib" "$both/$target/lib"
  rm -rf "$both/fetched"
  for folder in "$both"/targets/*; do  # as in a system's toolkit with several targets
    ln -s ../../include "$folder/include"
    ln -s lib "$folder/lib64"
  done
  ln -s libcudart.so.13 "$both/$target/lib/libcudart.so"
  echo "$stamp" >"$both/.stamp"
fi
echo "$both/bin/nvcc"
