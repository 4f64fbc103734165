#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# go_library.sh [FOLDER]: the Go module moec.dev/moec/lib/linux_amd64 with its libraries, those of
# FOLDER (else of `make packages`: build/release/lib/packaged), into build/go_library/linux_amd64,
# and print that folder.
here=$PWD
. "$(dirname "$0")/lib.sh"
libraries=$build/release/lib/packaged
[ -z "${1:-}" ] || libraries=$(cd "$here" && realpath "$1")
[ -e "$libraries/libmoec.so.0" ] || die "no libmoec.so.0 in $libraries; run make packages"
module=$build/go_library/linux_amd64
rm -rf "$module"
mkdir -p "$module"
cp bindings/go/lib/linux_amd64/{go.mod,library.go} LICENSE "$module"
for library in libmoec libmoec_cuda; do
  [ ! -e "$libraries/$library.so.0" ] || cp -L "$libraries/$library.so.0" "$module"
done
echo "$module"
