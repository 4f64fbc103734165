#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# format.sh [--check]: clang-format on every source; moec.h is laid out by hand.
. "$(dirname "$0")/lib.sh"
[ -x "$venv/bin/clang-format" ] || scripts/bootstrap.sh tools
mode=(-i)
[ "${1:-}" = --check ] && mode=(--dry-run -Werror)
# A source archive has no repository, or lies in another's: an empty one knows what to leave out.
if [ "$(git rev-parse --show-toplevel 2>/dev/null)" != "$(pwd -P)" ]; then
  GIT_DIR=$(mktemp -d) GIT_WORK_TREE=$root
  export GIT_DIR GIT_WORK_TREE
  trap 'rm -rf "$GIT_DIR"' EXIT
  git init -q
fi
mapfile -t -d '' files < <(git ls-files -co --exclude-standard -z -- '*.h' '*.c' '*.cpp' '*.cu' \
  '*.cuh' ':!capi/include')
[ ${#files[@]} -gt 0 ] || die "no sources were found in $root"
printf '%s\0' "${files[@]}" |
  xargs -0 -n 40 -P "$(nproc)" clang-format "${mode[@]}"
