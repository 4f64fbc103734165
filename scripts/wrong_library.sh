#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# wrong_library.sh COMMAND...: run a program with MOEC_LIBRARY set to a libmoec.so.0 of ABI 99. It
# must fail, and say which ABI it found, which it needs, and where the library is.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
library=$folder/libmoec.so.0
cc -shared -fPIC -Wl,-soname,libmoec.so.0 -xc - -o "$library" <<'C'
#include <stdint.h>
uint32_t moec_abi_version(void) { return 99; }
uint32_t moec_version(void) { return 9u << 22; }
const char *moec_version_string(void) { return "9.0.0"; }
C
if MOEC_LIBRARY=$library "$@" >"$folder/log" 2>&1; then
  echo "$*: a library of ABI 99 was accepted" >&2
  exit 1
fi
message="$library is 9.0.0 with ABI 99; 0.1.0 or later with ABI 0 is needed"
grep -qF "$message" "$folder/log" || { tail -n 20 "$folder/log" >&2; exit 1; }
echo "refused: ${message#"$folder"/}"
