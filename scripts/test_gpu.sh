#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_gpu.sh [PROGRAM...]: the tests of the CUDA backend on a machine with a GPU, or only those
# named (tool: the moec command and the array API; c, rust, go, julia: those languages; torch: the
# Python package on torch tensors; frameworks: torch, transformers and jax; qlora: PEFT and
# bitsandbytes, where this machine has them). Programs in build/gpu_carry/bin (gpu_carry.sh) are
# used as they are, else built now. Julia's test needs a julia on PATH or in build/julia.
# Writes bench/results/<gpu>/test_gpu.txt (with several GPUs test_2_gpus.txt, ..): one line a
# program. Each program's own output: build/log/gpu. Fresh data each time; MOEC_TEST_SEED repeats
# a run. GTEST_FILTER='*Up*' test_gpu.sh kernel_check runs some of its checks.
# MOEC_TEST_RANKS=8: so many ranks of an ep in C++ tests, which share GPUs where there are fewer;
# without it one for each GPU.
# MOEC_TEST_TRANSFORMERS names a folder with transformers 5.23 or later, for its expert parallelism
# on two GPUs where this machine's own is older.
. "$(dirname "$0")/lib.sh"

gpus=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader) ||
  die "no NVIDIA driver here"
gpu=$(head -n 1 <<<"$gpus") count=$(wc -l <<<"$gpus")
package=${MOEC_PACKAGE:-$(scripts/gpu_package.sh)}  # with the library and the plug-in inside
bin=$build/gpu_carry/bin
if [ ! -f "$bin/gpu_tests.txt" ]; then
  scripts/bootstrap.sh test
  cmake --preset release -DMOEC_CUDA=ON -DCMAKE_CUDA_COMPILER="$(scripts/cuda_toolkit.sh)"
  cmake --build "$build/release" -j "$(job_count)" --target gpu_tests
  bin=$build/release/bin
fi
export LD_LIBRARY_PATH=$package/moec/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export PYTHONPATH=$package${PYTHONPATH:+:$PYTHONPATH}
MOEC_TEST_SEED=${MOEC_TEST_SEED:-$(date +%s)}
export MOEC_TEST_SEED

chosen=$*
log=$build/log/gpu
folder=$root/bench/results/$(echo "${gpu%%,*}" | sed 's/^NVIDIA //' | tr 'A-Z ' 'a-z-')
case $count in 1) result=$folder/test_gpu.txt ;; *) result=$folder/test_${count}_gpus.txt ;; esac
mkdir -p "$log" "$folder"
{
  echo "$gpus"
  command=${chosen:+scripts/test_gpu.sh $chosen}
  echo "commit ${MOEC_COMMIT:-$(git rev-parse HEAD)}, MOEC_TEST_SEED=$MOEC_TEST_SEED," \
    "${command:-make test-gpu}"
} | tee "$result"
tasks=$(mktemp -d)  # all, and those of each queue by the turn that they take
# task QUEUE NAME COMMAND...: to be run. What takes longest begins first.
task() {
  local queue=$1 turn=3; shift
  case $1 in
    *racecheck | routing_agrees | ep_*_test* | lines_test.* | coded_test | torch_ep) turn=0 ;;
    *.portable* | sweep_test | values_test | schemes_test | python_*) turn=1 ;;
    *check) turn=2 ;;
  esac
  printf '%q ' "$@" | tee -a "$tasks/all" >>"$tasks/$queue.$turn"
  echo | tee -a "$tasks/all" >>"$tasks/$queue.$turn"
}
# run_queue QUEUE JOBS
run_queue() {
  { cat "$tasks/$1".[0-9] 2>/dev/null || true; } |
    xargs -r -d '\n' -n 1 -P "$2" bash -c 'eval "run_task $1"' _
}

# first_failures LOG: what a sanitizer or GoogleTest reports first, each failure behind the name of
# its check; without any, the end of the log.
first_failures() {
  awk '{end[NR % 5] = $0} /^\[ RUN/ {run = $NF} /^=========/ {print "    " $0}
    /: Failure$/ {print "  " run; left = 4; seen = 1} left-- > 0 {print "    " $0}
    END {for (i = NR + 1; !seen && i <= NR + 5; ++i) print "    " end[i % 5]}' "$1" | head -n 40
}
# run_task NAME COMMAND...: one line with the verdict and what the program says last.
run_task() {
  local name=$1 begin=$SECONDS status=0 verdict; shift
  timeout "$limit" "$@" >"$log/$name.txt" 2>&1 || status=$?
  case $status in 0) verdict=passed ;; 77) verdict=skipped ;; *) verdict="FAILED ($status)" ;; esac
  printf '%-32s %-12s %4d s  %s\n' "$name" "$verdict" $((SECONDS - begin)) \
    "$(grep -E '^\[  (PASSED|SKIPPED|FAILED) +\] [0-9]+ tests?|passed|failed|ERROR SUMMARY' \
      "$log/$name.txt" | sed 's/^=* *//' | tail -n 2 | paste -sd';')" |
    tee "$log/$name.line" | tee -a "$result"
  case $verdict in FAILED*) first_failures "$log/$name.txt" ;; esac
  [ "$verdict" = passed ]
}
export -f run_task first_failures
limit=${MOEC_TEST_LIMIT:-600}  # seconds for each program
export log result limit
wanted() { [ -z "$chosen" ] || [[ " $chosen " == *" $1 "* ]]; }

while read -r program options; do
  wanted "$program" || continue
  queue=host
  case $options in *busy*) queue=busy ;; *alone*) queue=alone ;; esac
  variables=$(sed 's/alone\|busy\|thirds\|[a-z]*check//g' <<<"$options")
  kernels=$(sed -n 's/.*MOEC_CUDA_KERNELS=\([a-z0-9_]*\).*/.\1/p' <<<"$options")
  if [[ " $options " == *" thirds "* ]]; then
    for third in 0 1 2; do
      task $queue "$program$kernels.$((third + 1))_of_3" env $variables GTEST_TOTAL_SHARDS=3 \
        GTEST_SHARD_INDEX=$third "$bin/$program"
    done
  else
    task $queue "$program$kernels" env $variables "$bin/$program"
  fi
  for tool in memcheck racecheck initcheck; do
    [[ " $options " == *" $tool "* ]] || continue
    task $queue "$program$kernels.$tool" env $variables MOEC_CHECK_SMALL=1 MOEC_CHECK_TOOL=$tool \
      compute-sanitizer --tool $tool --error-exitcode 9 "$bin/$program"
  done
done <"$bin/gpu_tests.txt"
if wanted c || wanted rust || wanted go; then
  [ -x "$bin/bindings_go" ] && [ -x "$bin/graph_c" ] || scripts/build_gpu_bindings.sh "$bin"
fi
export MOEC_LIBRARY=$package/moec/lib/libmoec.so.0 MOEC_GOLDEN_DIR=$root/tests/golden
if wanted tool; then  # every command that takes a device, with NumPy alone
  python3 -c 'import typer, rich' 2>/dev/null || PYTHONPATH=$PYTHONPATH:$build/gpu_carry/tools
  task host tool python3 -m pytest -m gpu -p no:cacheprovider bindings/python/tests/test_device.py
fi
# one_a_gpu PROGRAM: the program as a rank for each GPU, which meet by a file.
one_a_gpu() {
  local rank ranks=() id
  id=$(mktemp -u)
  for rank in $(seq 0 $((gpu_count - 1))); do "$1" "$rank" "$gpu_count" "$id" & ranks+=($!); done
  for rank in "${ranks[@]}"; do wait "$rank" || return 1; done
  echo "$gpu_count ranks, 1 passed, 0 failed"
}
export -f one_a_gpu
export gpu_count=$count
if wanted c; then  # README's program, and the examples of a graph and of NCCL
  task host graph "$bin/graph_c"
  nccl=$(python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0])' 2>/dev/null || true)
  if [ -x "$bin/nccl_c" ] && [ -d "$nccl/lib" ]; then
    task host nccl env LD_LIBRARY_PATH="$nccl/lib:$LD_LIBRARY_PATH" \
      bash -c 'one_a_gpu "$0"' "$bin/nccl_c"
  else
    echo "nccl: not run, NCCL of PyTorch or nccl_c is missing" | tee "$log/nccl.line"
    echo nccl >>"$tasks/all"
  fi
  task host c bash -c '"$0" | grep -x MOEC_OK && echo "1 passed, 0 failed"' "$bin/bindings_c"
fi
if wanted rust; then  # peers apart: where their kernels wait, nobody is to take memory
  task host rust "$bin/bindings_rust" --include-ignored --nocapture --skip peers
  task host rust_peers "$bin/bindings_rust" --include-ignored --nocapture peers
fi
if wanted go; then
  task host go env -C bindings/go MOEC_TEST_DEVICE=cuda "$bin/bindings_go" -test.run Device -test.v
fi
if wanted julia; then
  if scripts/julia.sh --here; then
    mkdir -p "$build/gpu_depot"
    task host julia env MOEC_TEST_DEVICE=cuda JULIA_DEPOT_PATH="$build/gpu_depot" \
      scripts/julia.sh -O0 --startup-file=no --project=bindings/julia \
      -L bindings/julia/test/json.jl -L bindings/julia/test/golden.jl \
      bindings/julia/test/quantised.jl
  else
    echo "julia: not run, there is none on this machine" | tee "$log/julia.line"
    echo julia >>"$tasks/all"
  fi
fi
if wanted torch; then
  task host torch python3 -m pytest -q -p no:cacheprovider tests/gpu/test_torch.py
  task host torch_ep python3 -m pytest -q -p no:cacheprovider tests/gpu/test_torch_ep.py
fi
framework_task() {  # a module's tests that are marked gpu
  task host "python_$1" env XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONPATH="$PYTHONPATH" \
    python3 -m pytest -m gpu -p no:cacheprovider \
    "bindings/python/framework_tests/test_$1.py"
}
if wanted frameworks; then  # beside this machine's torch, transformers and jax
  modules=(torch_gpu torch_bias torch_nan torch_codes torch_adapters torch_lora packed_mxfp4)
  modules+=(transformers jax)
  for module in "${modules[@]}"; do framework_task "$module"; done
  newest=${MOEC_TEST_TRANSFORMERS:+$MOEC_TEST_TRANSFORMERS:}$PYTHONPATH
  parallel='import transformers.distributed.expert_parallel'
  if [ "$count" -gt 1 ] && PYTHONPATH=$newest python3 -c "$parallel" 2>/dev/null; then
    PYTHONPATH=$newest framework_task transformers_parallel
  fi
fi
if wanted qlora; then
  if python3 -c 'import peft, bitsandbytes' 2>/dev/null; then
    export HF_HUB_OFFLINE=1
    framework_task peft
    framework_task qlora
    task host python_packed_load env MOEC_TEST_DEVICE=cuda python3 -m pytest -p no:cacheprovider \
      bindings/python/framework_tests/test_packed_load.py
    task host example_qlora python3 examples/qlora/finetune.py --check --device cuda
  else
    echo "qlora: not run, PEFT or bitsandbytes is missing" | tee "$log/qlora.line"
    echo qlora >>"$tasks/all"
  fi
fi
status=0  # programs take turns on the GPU in slices: those that keep it busy are few at a time
run_queue alone 1 || status=1
run_queue busy "${MOEC_TEST_BUSY_JOBS:-2}" & busy=$!
run_queue host "${MOEC_TEST_JOBS:-6}" || status=1
wait $busy || status=1
head=$(head -n $((count + 1)) "$result")
{ echo "$head"; while read -r name _; do cat "$log/$name.line"; done <"$tasks/all"; } >"$result"
echo "written: $result"
exit $status
