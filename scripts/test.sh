#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test.sh: everything that can be tested without a GPU. One line a stage; stops at the first failure
# and shows the end of that stage's log (all logs lie in build/log). The last line sums up every
# "N passed, M failed" that a stage ended with.
. "$(dirname "$0")/lib.sh"
mkdir -p "$build/log"
passed=0 skipped=0

# count WORD LOG: the number before WORD in the last line that says how many passed or failed.
count() {
  local number
  number=$(grep -E '[0-9]+ (passed|failed)' "$2" | tail -n 1 | sed -nE "s/.*\b([0-9]+) $1.*/\1/p")
  echo "${number:-0}"
}

stage() { # stage NAME COMMAND...
  local name=$1 log=$build/log/${1// /_}.txt begin=$SECONDS status=0 failed; shift
  printf '%-16s' "$name"
  "$@" >"$log" 2>&1 </dev/null || status=$?
  passed=$((passed + $(count passed "$log"))) skipped=$((skipped + $(count skipped "$log")))
  if [ $status != 0 ]; then
    printf 'FAILED after %d s; the end of %s:\n' $((SECONDS - begin)) "${log#"$root"/}"
    tail -n 60 "$log"
    failed=$(count failed "$log")
    printf '%d passed, %d failed\n' $passed $((failed > 0 ? failed : 1))
    exit 1
  fi
  printf '%6d s%s\n' $((SECONDS - begin)) "$(sed -nE '$s/^.*\b([0-9]+ passed).*/   \1/p' "$log")"
}

configure() { cmake --preset "$1" --log-level=WARNING "${@:2}"; }
compile() { cmake --build "$build/$1" -j "$(job_count)" "${@:2}"; }

# The thread sanitizer of gcc 12 cannot map its memory where addresses are drawn from 32 bits.
no_aslr=()
setarch -R true 2>/dev/null && no_aslr=(setarch -R)

stage "bootstrap"       scripts/bootstrap.sh test
stage "cuda toolkit"    scripts/cuda_toolkit.sh
stage "rooms"           python3 tests/check_rooms.py
stage "format"          scripts/format.sh --check
nvcc=$(scripts/cuda_toolkit.sh)
stage "configure"       configure release -DMOEC_CUDA=ON -DCMAKE_CUDA_COMPILER="$nvcc" \
                          -DMOEC_TIDY=ON -DMOEC_FUZZ_SECONDS=2
stage "build"           compile release
stage "tests"           scripts/run_ctest.py "$build/release"
stage "python"          scripts/test_python.sh
stage "c"               scripts/test_c.sh
stage "rust"            scripts/test_rust.sh
stage "candle"          scripts/test_candle.sh
stage "go"              scripts/test_go.sh
stage "julia"           scripts/test_julia.sh
stage "frameworks"      scripts/test_frameworks.sh
stage "configure asan"  configure asan
stage "build asan"      compile asan --target tests_asan
stage "tests asan"      scripts/run_ctest.py "$build/asan" -L asan
stage "configure tsan"  configure tsan
stage "build tsan"      compile tsan --target tests_tsan
stage "tests tsan"      ${no_aslr[@]+"${no_aslr[@]}"} scripts/run_ctest.py "$build/tsan" -L tsan

[ $skipped = 0 ] || echo "$skipped cases need hardware that is not here; build/log names them"
echo "all stages in $SECONDS s"
printf '%d passed, 0 failed\n' $passed
