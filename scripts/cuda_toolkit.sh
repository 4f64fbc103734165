#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# cuda_toolkit.sh: print the nvcc to build the CUDA plug-in with: CUDA_HOME's or PATH's when it is
# CUDA 13 or later, else that of a pinned set of packages put into build/cuda (1.1 GB, once).
. "$(dirname "$0")/lib.sh"

# All six are pinned: left alone they resolve to releases that do not fit each other.
pins="nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cublas==13.1.0.3"
home=$build/cuda/nvidia/cu13

major() { "$1" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\)\..*/\1/p'; }

for nvcc in "${CUDA_HOME:+$CUDA_HOME/bin/nvcc}" "$(command -v nvcc || true)"; do
  if [ -x "$nvcc" ] && [ "$(major "$nvcc")" -ge 13 ]; then echo "$nvcc"; exit 0; fi
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
echo "$home/bin/nvcc"
