#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# format.sh [--check]: clang-format on every source; moec.h is laid out by hand.
. "$(dirname "$0")/lib.sh"
[ -x "$venv/bin/clang-format" ] || scripts/bootstrap.sh
mode=(-i)
[ "${1:-}" = --check ] && mode=(--dry-run -Werror)
git ls-files -co --exclude-standard -z '*.h' '*.c' '*.cpp' '*.cu' '*.cuh' ':!capi/include' |
  xargs -0 -n 40 -P "$(nproc)" clang-format "${mode[@]}"
