#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# bench_peers.sh [--transformers] ...: beside PyTorch, in the environment of the framework tests:
# the experts' forward pass and training step (arguments: bench/peers/torch_layer.py), or with
# --transformers a Hugging Face model's (bench/peers/transformers_model.py).
here=$PWD
. "$(dirname "$0")/lib.sh"
program=torch_layer.py
if [ "${1:-}" = --transformers ]; then program=transformers_model.py; shift; fi
scripts/bootstrap.sh demo
scripts/frameworks_venv.sh
scripts/build_wheel.sh "$build/peers-wheel"
site=$build/peers-site
rm -rf "$site"
"$build/frameworks/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
  --no-index --target "$site" "$build"/peers-wheel/moec-*.whl
cd "$here"
PYTHONPATH=$site exec "$build/frameworks/bin/python" "$root/bench/peers/$program" "$@"
