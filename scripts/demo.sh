#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# demo.sh: build what the demo needs, then show the main job: the golden families, a full-size layer
# of a real model, and its speed beside the loop that users run today. Leaves build/demo/speed.png.
. "$(dirname "$0")/lib.sh"
scripts/bootstrap.sh demo

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
rm -rf layer outputs.safetensors
took=$((SECONDS - started))
printf '\nThe demo took %d s after the build. The plot is build/demo/speed.png.\n' $took
