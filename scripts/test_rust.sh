#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_rust.sh: clippy without a warning, tests and documentation examples with the default, the
# dynamic and all features (all: bindgen runs, and the committed bindings must equal its output);
# then the crates are packed, and examples/rust is built from the packed files alone, outside the
# tree, and run without LD_LIBRARY_PATH.
. "$(dirname "$0")/lib.sh"
prefix=$(scripts/install_for_bindings.sh)
cargo=$root/scripts/cargo.sh
log=$build/bindings/rust.txt
: >"$log"

cd bindings/rust
retry "the crates of bindings/rust" "$cargo" fetch --locked
cargo fmt --version >/dev/null 2>&1 && "$cargo" fmt --all --check
for features in "" "--features dynamic" "--all-features"; do
  library=
  [ -z "$features" ] || library=$prefix/lib/libmoec.so.0  # only these open it at run time
  "$cargo" clippy --quiet --offline --all-targets $features -- -D warnings
  MOEC_LIBRARY=$library "$cargo" test --quiet --offline --workspace $features | tee -a "$log"
done
"$root/scripts/wrong_library.sh" "$cargo" test --quiet --offline -p moec-sys --features dynamic \
  --test layout the_library
echo "test result: ok. 1 passed (another ABI is refused)" >>"$log"
RUSTDOCFLAGS="-D warnings" "$cargo" doc --quiet --offline --no-deps --features ndarray

"$cargo" package --quiet --offline --workspace --allow-dirty
outside=$(mktemp -d)
trap 'rm -rf "$outside"' EXIT
for crate in moec moec-sys; do
  tar xzf "$build/rust/package/$crate-0.1.0.crate" -C "$outside"
  [ ! -e "$outside/$crate-0.1.0/tests" ] || die "$crate packs tests that need the source tree"
done
cp -r "$root/examples/rust" "$outside/train"
cp Cargo.lock "$outside/train"
cd "$outside/train"
mkdir -p "$build/rust/outside"  # its dependencies are kept, its crates are new each time
find "$build/rust/outside" \( -name '*moec*' -o -name '*train*' \) -prune -exec rm -rf {} +
train=$build/rust/outside/debug/train
build_outside() {
  CARGO_TARGET_DIR=$build/rust/outside "$cargo" build --quiet --offline \
    --config 'patch.crates-io.moec.path="../moec-0.1.0"' \
    --config 'patch.crates-io.moec-sys.path="../moec-sys-0.1.0"'
}
build_outside
env -u LD_LIBRARY_PATH "$train"
! readelf -d "$train" | grep -q libmoec || die "examples/rust is not linked statically"
MOEC_LINK=shared build_outside
LD_LIBRARY_PATH=$prefix/lib "$train"
readelf -d "$train" | grep -q libmoec.so.0 || die "MOEC_LINK=shared does not link libmoec.so.0"
echo "test result: ok. 2 passed (examples/rust, static and shared)" >>"$log"

awk '/^test result:/ {for (i = 1; i < NF; i++) if ($(i + 1) ~ /^passed/) sum += $i}
  END {print sum " passed, 0 failed"}' "$log"
