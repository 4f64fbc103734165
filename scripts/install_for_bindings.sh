#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# install_for_bindings.sh: install build/release (built by make test) into build/bindings/prefix, as
# a package manager would, and print that folder. Unchanged files keep their times.
. "$(dirname "$0")/lib.sh"
prefix=$build/bindings/prefix
[ -e "$build/release/lib/libmoec.a" ] || die "build/release is not built; run make test"
cmake --install "$build/release" --prefix "$prefix" >"$build/bindings.txt" 2>&1 ||
  { tail -n 20 "$build/bindings.txt" >&2; die "the library cannot be installed"; }
echo "$prefix"
