#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# go_library.sh: the Go module moec.dev/moec/lib with the libraries of packaged.sh for both
# processors, into build/go_library, and print that folder.
. "$(dirname "$0")/lib.sh"
module=$build/go_library
rm -rf "$module"
mkdir -p "$module"
cp bindings/go/lib/* LICENSE "$module"
for pair in amd64: arm64:aarch64; do
  folder=$module/linux_${pair%:*}
  tree=$(scripts/packaged.sh ${pair#*:})
  mkdir "$folder"
  for library in "$tree"/lib/packaged/*.so.0; do
    cp -L "$library" "$folder"
  done
done
echo "$module"
