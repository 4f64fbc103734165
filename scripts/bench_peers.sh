#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# bench_peers.sh: the training step and the forward pass beside PyTorch's grouped_mm layer, in an
# environment of their own (build/peers-venv, several GB). Arguments: bench/peers/torch_layer.py.
. "$(dirname "$0")/lib.sh"
peers=$build/peers-venv
scripts/bootstrap.sh demo
if [ ! -f "$peers/.torch" ]; then
  python3 -m venv "$peers"
  retry "torch" "$peers/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 ml_dtypes==0.6.0
  touch "$peers/.torch"
fi
scripts/build_wheel.sh "$build/peers-wheel"
"$peers/bin/pip" install --quiet --no-deps --force-reinstall "$build"/peers-wheel/moec-*.whl
cd "$build" && exec "$peers/bin/python" "$root/bench/peers/torch_layer.py" "$@"
