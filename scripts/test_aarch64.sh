#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_aarch64.sh: aarch64, built across and run by qemu-aarch64: the tests labelled aarch64, on a
# processor with every instruction set and on one without BF16.
. "$(dirname "$0")/lib.sh"
cmake --preset aarch64 --log-level=WARNING
cmake --build "$build/aarch64" -j "$(job_count)" --target tests_aarch64
scripts/run_ctest.py "$build/aarch64" -L aarch64
