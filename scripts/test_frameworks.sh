#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_frameworks.sh: moec.torch, moec.transformers and moec.jax on the installed wheel, the
# training examples, and the wheel's own audit. PyPI has no CPU-only torch: the
# environment takes 5 GB.
. "$(dirname "$0")/lib.sh"
place=$build/frameworks       # current versions of all three
older=$build/frameworks-older # the oldest transformers and PEFT that are supported
trl=$build/frameworks-trl/site-packages
tests=$root/bindings/python/framework_tests
pins=scripts/requirements_frameworks.txt
scripts/frameworks_venv.sh

ls "$build"/wheel/moec-*.whl >/dev/null 2>&1 || scripts/wheel.sh  # the stage "python" makes it
wheel=$(echo "$build"/wheel/moec-*.whl)
"$place/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-index \
  --force-reinstall "$build"/wheel/*.whl
"$place/bin/abi3audit" --strict "$wheel"

outside=$(mktemp -d)
trap 'rm -rf "$outside"' EXIT
export TORCHINDUCTOR_CACHE_DIR=$build/inductor HF_HUB_OFFLINE=1
cd "$outside"

# part NAME COMMAND...: run one part of the tests; its output goes to NAME.txt.
part() {
  local name=$1; shift
  "$@" >"$name.txt" 2>&1 || echo "$name: exit status $?" >>"$name.txt"
}
pytest=("$place/bin/python" -m pytest -p no:cacheprovider)
# One thread a part, two parts at a time: the shapes are small, and OpenMP's threads wait busily for
# one that another program keeps from running.
export OMP_NUM_THREADS=1
{
  part torch "${pytest[@]}" "$tests" --ignore "$tests/test_jax.py"
  part jax "${pytest[@]}" "$tests/test_jax.py"
} &
part example "$place/bin/python" "$root/examples/train_moe/train.py" --steps 12 --check
part trl env PYTHONPATH="$trl" "${pytest[@]}" "$tests/test_trl.py"
part qlora "$place/bin/python" "$root/examples/qlora/finetune.py" --check
part qlora_120b "$place/bin/python" "$root/examples/qlora_120b/train.py" --tiny --device cpu \
  --batch 2 --length 64 --check
part older env PYTHONPATH="$older" "${pytest[@]}" "$tests"/test_{peft,transformers}.py \
  "$tests"/test_packed_{load,mxfp4}.py -k "test_peft or every_gradient or calls or left_out or \
  not_known or without_moec or loads_packed or save_and_load or packed_and_trained or kernels_that"
wait
cat torch.txt older.txt trl.txt jax.txt example.txt qlora.txt qlora_120b.txt
passed=$(sed -nE 's/.*\b([0-9]+) passed.*/\1/p' ./*.txt | awk '{n += $1} END {print n + 0}')
failed=$(cat ./*.txt | grep -c "exit status" || true)
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
