#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test.sh: everything that can be tested without a GPU. One line a stage: how long it took, and how
# many seconds of a core, which other work on the machine does not change much. No stage begins
# after the first failure, which shows the end of its log (all logs lie in build/log). Once the
# engine's own tests have passed, three lanes of stages run beside each other: most of those stages
# use one core, and wait at times. What they need from the network is fetched beside the build. The
# last line sums up every "N passed, M failed" that a stage ended with.
. "$(dirname "$0")/lib.sh"
mkdir -p "$build/log"
results=$(mktemp)  # a line a stage: passed, failed, skipped
lanes=() in_lane='' ended=''

finish() {
  local passed failed skipped
  [ ${#lanes[@]} = 0 ] || kill -- "${lanes[@]/#/-}" 2>/dev/null || true  # what an interrupt left
  read -r passed failed skipped \
    < <(awk '{p += $1; f += $2; s += $3} END {print p + 0, f + 0, s + 0}' "$results")
  rm "$results"
  [ $ended ] || [ "$failed" != 0 ] || { echo "stopped before the end"; failed=1; }
  [ "$skipped" = 0 ] || echo "$skipped cases need hardware that is not here; build/log names them"
  echo "all stages in $SECONDS s"
  printf '%d passed, %d failed\n' "$passed" "$failed"
}
trap finish EXIT

# count WORD LOG: the number before WORD in the last line that says how many passed or failed.
count() {
  local number
  number=$(grep -E '[0-9]+ (passed|failed)' "$2" | tail -n 1 | sed -nE "s/.*\b([0-9]+) $1.*/\1/p")
  echo "${number:-0}"
}

# cores FILE: the seconds of a core of all commands so far, of which `times` told FILE.
cores() { tr ms '  ' <"$1" | awk 'NR == 2 {print int($1 * 60 + $2 + $3 * 60 + $4)}'; }

stage() { # stage NAME COMMAND...
  local name=$1 log=$build/log/${1// /_}.txt begin=$SECONDS status=0 failed title used; shift
  times >"$log.times"
  used=$(cores "$log.times")
  awk '$2 > 0 {exit 1}' "$results" || exit 1  # the other lane failed
  printf -v title '%-18s' "$name"
  [ $in_lane ] || { printf '%s' "$title"; title=; }
  "$@" >"$log" 2>&1 </dev/null || status=$?
  failed=$(count failed "$log")
  [ $status = 0 ] || [ "$failed" != 0 ] || failed=1
  echo "$(count passed "$log") $failed $(count skipped "$log")" >>"$results"
  if [ $status != 0 ]; then
    printf '%sFAILED after %d s; the end of %s:\n%s\n' "$title" $((SECONDS - begin)) \
      "${log#"$root"/}" "$(tail -n 60 "$log")"
    exit 1
  fi
  times >"$log.times"
  used=$(($(cores "$log.times") - used))
  rm "$log.times"
  printf '%s%6d s %6d s of a core%s\n' "$title" $((SECONDS - begin)) $used \
    "$(sed -nE '$s/^.*\b([0-9]+ passed).*/   \1/p' "$log")"
}

# lane FUNCTION: begin its stages, in a process group of their own.
lane() {
  set -m
  (in_lane=1; "$1") &
  set +m
  lanes+=($!)
}

# What takes minutes to download comes while the engine is built, which needs the processor alone.
fetch() {
  scripts/frameworks_venv.sh
  scripts/go.sh version
  scripts/julia.sh --where || [ $? = 127 ]
}
fetched() {
  local status=0
  wait "${lanes[0]}" || status=$?
  lanes=()
  cat "$build/log/fetch.txt"
  return $status
}

configure() { cmake --preset "$1" --log-level=WARNING "${@:2}"; }
compile() { cmake --build "$build/$1" -j "$(job_count)" "${@:2}"; }

# The thread sanitizer of gcc 12 cannot map its memory where addresses are drawn from 32 bits.
no_aslr=()
setarch -R true 2>/dev/null && no_aslr=(setarch -R)

python_lane() {
  stage "python"          scripts/test_python.sh
  stage "wheel aarch64"   scripts/test_wheel_aarch64.sh
  stage "frameworks"      scripts/test_frameworks.sh
}
rust_lane() {
  stage "rust"            scripts/test_rust.sh
  stage "candle"          scripts/test_candle.sh
  stage "docs"            scripts/docs.sh
  stage "go"              scripts/test_go.sh
}
languages_lane() {
  stage "c"               scripts/test_c.sh
  stage "packages"        scripts/test_packages.sh
  stage "packages aarch64" scripts/test_packages.sh aarch64
  stage "cuda aarch64"    scripts/test_cuda_aarch64.sh
  stage "julia"           scripts/test_julia.sh
  stage "tests aarch64"   scripts/run_ctest.py "$build/aarch64" -L aarch64
  stage "configure asan"  configure asan -DMOEC_FUZZ_SECONDS=5 \
                            -DMOEC_PROGRAMS="$build/release" -DMOEC_TILES="$build/release"
  stage "build asan"      compile asan --target tests_asan
  stage "tests asan"      scripts/run_ctest.py "$build/asan" -L asan
  stage "configure tsan"  configure tsan \
                            -DMOEC_PROGRAMS="$build/release" -DMOEC_TILES="$build/release"
  stage "build tsan"      compile tsan --target tests_tsan
  stage "tests tsan"      ${no_aslr[@]+"${no_aslr[@]}"} scripts/run_ctest.py "$build/tsan" -L tsan
}

stage "bootstrap"         scripts/bootstrap.sh test
lane fetch >"$build/log/fetch.txt" 2>&1
stage "cuda toolkit"      scripts/cuda_toolkit.sh
stage "zig"               scripts/zig.sh
stage "rooms"             python3 tests/check_rooms.py
stage "format"            scripts/format.sh --check
nvcc=$(scripts/cuda_toolkit.sh)
stage "configure"         configure release -DMOEC_CUDA=ON -DCMAKE_CUDA_COMPILER="$nvcc" \
                            -DMOEC_ZIG="$(scripts/zig.sh)" -DMOEC_TIDY=ON -DMOEC_FUZZ_SECONDS=2
stage "build"             compile release --target all moec_packaged moec_cuda_packaged
stage "configure aarch64" configure aarch64 -DMOEC_CUDA=OFF -DMOEC_ZIG="$(scripts/zig.sh)"
stage "build aarch64"     compile aarch64 --target tests_aarch64 moec moec_static moec_packaged
stage "tests"             scripts/run_ctest.py "$build/release"
stage "downloads"         fetched
stage "install"           scripts/install_for_bindings.sh
lane python_lane
lane rust_lane
lane languages_lane
status=0
for pid in "${lanes[@]}"; do wait "$pid" || status=1; done
ended=1
exit $status
