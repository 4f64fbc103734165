#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# lint.sh: rooms, format, and clang-tidy.
. "$(dirname "$0")/lib.sh"
scripts/bootstrap.sh test
python3 tests/check_rooms.py
scripts/format.sh --check
cmake --preset release --log-level=WARNING -DMOEC_TIDY=ON
cmake --build "$build/release" -j "$(job_count)" --target tidy
