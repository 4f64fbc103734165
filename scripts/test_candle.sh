#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_candle.sh: examples/candle, moec as an operation of candle, on the golden vectors. A stage of
# its own: candle takes about half a minute of two cores to compile the first time.
. "$(dirname "$0")/lib.sh"
scripts/install_for_bindings.sh >/dev/null
log=$build/bindings/candle.txt
cd examples/candle
retry "the crates of examples/candle" "$root/scripts/cargo.sh" fetch --locked
"$root/scripts/cargo.sh" test --quiet --offline | tee "$log"
awk '/^test result: ok/ {sum += $4} END {print sum " passed, 0 failed"}' "$log"
