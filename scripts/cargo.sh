#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# cargo.sh ARGUMENTS...: cargo on the library installed in build/bindings/prefix, every output
# under build/rust, libclang of the pinned tools. Needs Rust 1.84 (examples/candle 1.87), which
# scripts/bootstrap.sh sees to.
here=$PWD
. "$(dirname "$0")/lib.sh"
cd "$here"
prefix=$build/bindings/prefix
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$build/rust} CARGO_TERM_COLOR=never
export CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_TEST_DEBUG=0 CARGO_INCREMENTAL=0 CARGO_BUILD_JOBS
CARGO_BUILD_JOBS=$(job_count)
export RUSTFLAGS="-D warnings"
# Crates outside the workspace at hand, of which candle has many, compile faster without checks.
others='profile.dev.package."*"'
LIBCLANG_PATH=$(dirname "$(find "$venv/lib" -name libclang.so | head -n 1)")
export LIBCLANG_PATH
exec cargo --config "$others.debug-assertions=false" --config "$others.overflow-checks=false" "$@"
