#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# demo.sh: build what the demo needs, then show the main job: the golden families, a full-size layer
# of a real model, and its speed beside the loop that users run today. On a machine with a GPU whose
# driver serves CUDA 13 the plug-in is built, too, and the GPU does the same; beside it PyTorch
# where a python3 has it. Leaves build/demo/speed.png and, of a GPU, speed_gpu.png.
outside=$(type -ap python3 || true)  # before lib.sh puts ours in front
. "$(dirname "$0")/lib.sh"
oldest_driver=580
scripts/bootstrap.sh demo

driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null || true)
driver=${driver%%$'\n'*}
MOEC_NVCC=
if [ -n "$driver" ] && [ "${driver%%.*}" -ge $oldest_driver ]; then
  MOEC_NVCC=$(scripts/cuda_toolkit.sh)
  searched=${LD_LIBRARY_PATH:-}
  # cuBLASLt of that toolkit, where the loader finds none.
  export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}${MOEC_NVCC%/bin/nvcc}/lib64
elif [ -n "$driver" ]; then
  echo "the GPU stays unused: its driver is $driver, CUDA 13 needs $oldest_driver or newer"
fi
export MOEC_NVCC

show() { printf '\n$ %s\n' "$*"; "$@"; }

out=$build/demo
mkdir -p "$out"
echo "building the library and the Python package (log: build/log/wheel.txt)"
scripts/build_wheel.sh "$out/wheel" >/dev/null
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-index \
  --force-reinstall "$out"/wheel/*.whl
started=$SECONDS
cd "$out"
show moec info
show moec check
show moec synth --model qwen3-30b --out layer
show moec run layer --tokens 512 --grad --out outputs.safetensors
show moec bench --model qwen3-30b --tokens 1 --tokens 16 --tokens 128 --tokens 512 --naive \
  --seconds 0.5 --json speed.json --plot speed.png
plots=build/demo/speed.png
torch_here() { "$1" -c 'import torch; torch.cuda.current_device()' >/dev/null 2>&1; }
if [ -n "$MOEC_NVCC" ]; then
  show moec check --device cuda
  show moec run layer --tokens 512 --grad --device cuda --out outputs.safetensors
  show moec bench --model qwen3-30b --tokens 1 --tokens 16 --tokens 128 --tokens 512 \
    --device cuda --seconds 0.5 --json speed_gpu.json --plot speed_gpu.png
  plots="$plots and build/demo/speed_gpu.png"
  LD_LIBRARY_PATH=$searched  # PyTorch has its own
  for python in "$build/frameworks/bin/python" $outside; do
    if torch_here "$python"; then
      show "$python" "$root/bench/peers/torch_grouped.py" --model qwen3-30b --device cuda \
        --tokens 1 --tokens 16 --tokens 128 --tokens 512
      break
    fi
  done
fi
rm -rf layer outputs.safetensors
took=$((SECONDS - started))
printf '\nThe demo took %d s after the build. Plots: %s.\n' $took "$plots"
