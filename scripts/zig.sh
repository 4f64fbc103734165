#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# zig.sh: print the zig that links what packages carry (link_packaged.sh): pinned, put into
# build/zig once (0.4 GB). It brings the symbols of every older glibc.
. "$(dirname "$0")/lib.sh"

pin=ziglang==0.17.1
if [ "$(cat "$build/zig/.stamp" 2>/dev/null)" != "$pin" ]; then
  echo "fetching the linker of packages into build/zig" >&2
  [ -x "$venv/bin/python" ] || "$root/scripts/bootstrap.sh" test >&2
  rm -rf "$build/zig"
  retry "$pin" "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps \
    --target "$build/zig" "$pin"
  echo "$pin" >"$build/zig/.stamp"
fi
echo "$build/zig/ziglang/zig"
