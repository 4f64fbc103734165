#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# xla_headers.sh: the FFI headers of the oldest jaxlib that moec.jax works with, into
# build/xla_headers; prints their folder. Handlers built from newer headers are refused by older
# versions of jaxlib; the reverse works.
. "$(dirname "$0")/lib.sh"
version=0.5.0
folder=$build/xla_headers/$version
if [ ! -f "$folder/jaxlib/include/xla/ffi/api/ffi.h" ]; then
  download=$(mktemp -d)
  trap 'rm -rf "$download"' EXIT
  retry "jaxlib $version" "$venv/bin/python" -m pip download --quiet --disable-pip-version-check \
    --no-deps --only-binary :all: --python-version 3.11 --dest "$download" "jaxlib==$version"
  "$venv/bin/python" - "$download"/jaxlib-*.whl "$folder" <<'PYTHON'
import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
ffi = [n for n in wheel.namelist() if n.startswith("jaxlib/include/xla/ffi")]
wheel.extractall(sys.argv[2], ffi)
PYTHON
fi
echo "$folder/jaxlib/include"
