#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# generate_bindings.sh: rewrite every generated layer after a change of moec.h, once build/release
# has the new library: libclang's (Julia, Go, Rust's dynamic half, api.json) and bindgen's.
. "$(dirname "$0")/lib.sh"
"$venv/bin/python" bindings/generate.py
scripts/install_for_bindings.sh >/dev/null
cd bindings/rust
MOEC_REWRITE_BINDINGS=$PWD/moec-sys/src/raw_bindings.rs "$root/scripts/cargo.sh" test --quiet \
  -p moec-sys --all-features committed_bindings >/dev/null 2>&1 || true  # it compares with the old
"$root/scripts/cargo.sh" test --quiet -p moec-sys --all-features committed_bindings
