#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_rust.sh: clippy without a warning with the default, the dynamic and all features; tests and
# documentation examples with the default and with all (bindgen runs, the library is opened at run
# time, and the committed bindings must equal bindgen's output), those of moec-sys with dynamic
# alone; then the crates are packed, and examples/rust and the programs of docs/ are built from the
# packed files alone, outside the tree, and run without LD_LIBRARY_PATH; and README's program with
# the feature vendored, where no library is installed.
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
  packages=--workspace
  [ "$features" != "--features dynamic" ] || packages="-p moec-sys"  # all features open it, too
  MOEC_LIBRARY=$library "$cargo" test --quiet --offline $packages $features | tee -a "$log"
done
"$root/scripts/wrong_library.sh" "$cargo" test --quiet --offline -p moec-sys --features dynamic \
  --test layout the_library
echo "test result: ok. 1 passed (another ABI is refused)" >>"$log"
RUSTDOCFLAGS="-D warnings" "$cargo" doc --quiet --offline --no-deps --features ndarray

# cargo's home keeps the source of a crate by its version, even of one that is packed here: packing
# has a home and a target folder of its own, with the same downloads, new each time.
packing=$build/rust/packing
user_home=${CARGO_HOME:-$HOME/.cargo}
rm -rf "$packing"
mkdir -p "$packing/home/registry"
for kept in config.toml registry/index registry/cache; do
  [ ! -e "$user_home/$kept" ] || ln -s "$user_home/$kept" "$packing/home/$kept"
done
# What is packed is compiled below, outside, and not by cargo once more.
CARGO_HOME=$packing/home "$cargo" package --quiet --offline --workspace --allow-dirty --no-verify \
  --target-dir "$packing/target"
outside=$(mktemp -d)
trap 'rm -rf "$outside"' EXIT
[ "$(stat -c %s "$packing/target/package/moec-sys-0.1.0.crate")" -lt 1000000 ] ||
  die "the crate moec-sys, which carries the library's sources, has 1 MB or more"
for crate in moec moec-sys; do
  tar xzf "$packing/target/package/$crate-0.1.0.crate" -C "$outside"
  [ ! -e "$outside/$crate-0.1.0/tests" ] || die "$crate packs tests that need the source tree"
done
cp -r "$root/examples/rust" "$outside/train"
cp Cargo.lock "$outside/train"
pages=$("$venv/bin/python" "$root/scripts/page_code.py" rust "$outside/train/src/bin")
cd "$outside/train"
mkdir -p "$build/rust/outside"  # its dependencies are kept, its crates are new each time
find "$build/rust/outside" -regextype posix-extended \
  -regex '.*(moec|train|serve|adapter|tour)[^/]*' -prune -exec rm -rf {} +
train=$build/rust/outside/debug/train
build_outside() {
  CARGO_TARGET_DIR=$build/rust/outside "$cargo" build --quiet --offline \
    --config 'patch.crates-io.moec.path="../moec-0.1.0"' \
    --config 'patch.crates-io.moec-sys.path="../moec-sys-0.1.0"' "$@"
}
build_outside
env -u LD_LIBRARY_PATH "$train"
env -u LD_LIBRARY_PATH "$(dirname "$train")/adapter"
! readelf -d "$train" | grep -q libmoec || die "examples/rust is not linked statically"
for page in $pages; do
  page=$(basename "$page" .rs)
  env -u LD_LIBRARY_PATH "$(dirname "$train")/$page"
  echo "test result: ok. 1 passed (docs, $page)" >>"$log"
done
one='1 2 3 4 5 6 7 8'
served=$(printf '%s\n' "$one" "$one;$one" "1 2" "$one" |
  env -u LD_LIBRARY_PATH "$(dirname "$train")/serve")
# A batch of the same token twice is its y twice, and a wrong line is one answer.
awk 'NR == 1 {y = $0} NR == 2 && $0 != y "; " y {exit 1} NR == 3 && !/^error: token 0/ {exit 1}
  NR == 4 && $0 != y {exit 1} END {exit NR != 4}' <<<"$served" ||
  die "examples/rust serves $served"
echo "test result: ok. 1 passed (examples/rust, serve)" >>"$log"
MOEC_LINK=shared build_outside --bin train
LD_LIBRARY_PATH=$prefix/lib "$train"
readelf -d "$train" | grep -q libmoec.so.0 || die "MOEC_LINK=shared does not link libmoec.so.0"
echo "test result: ok. 3 passed (examples/rust, adapter, train static and shared)" >>"$log"

# README's first program on the packed crates. They lie in one place, where only what changed is
# written: the library is compiled once. -O0 finds a missing source or symbol as -O3 does, in less
# than half the time; what most files include of the standard library comes precompiled, except to
# tiles, which have flags of their own: that files include what they use is house/includes's.
packed=$build/rust/packed
mkdir -p "$packed/readme/src"
for crate in moec moec-sys; do
  "$venv/bin/python" "$root/scripts/same_tree.py" "$outside/$crate-0.1.0" "$packed/$crate-0.1.0"
done
cat >"$packed/readme/Cargo.toml" <<'TOML'
[package]
name = "readme"
version = "0.0.0"
edition = "2021"

[dependencies]
moec = { version = "0.1", features = ["vendored"] }

[features]
cuda = ["moec/cuda"]

[patch.crates-io]
moec = { path = "../moec-0.1.0" }
moec-sys = { path = "../moec-sys-0.1.0" }

[workspace]
TOML
awk '/^```$/ {if (inside) exit} inside {print} /^```rust$/ {inside = 1}' \
  "$root/bindings/rust/moec/README.md" >"$packed/readme/src/main.rs"
cp "$root/bindings/rust/Cargo.lock" "$packed/readme"
cd "$packed/readme"
flags=(-std=c++20 -fPIC -DNDEBUG -ffp-contract=off -fno-math-errno -fvisibility=hidden -O0 -w)
c++ "${flags[@]}" -x c++-header "$root/src/core/precompiled.h" -o "$packed/headers.h.gch"
echo '#error "headers.h.gch was compiled with other flags than this file"' >"$packed/headers.h"
cat >"$packed/c++" <<SH
#!/bin/sh
case "\$*" in
  *" -c "*tile_* | *CMakeC*) exec c++ "\$@" -O0 ;;
  *" -c "*) exec c++ -include "$packed/headers.h" "\$@" -O0 ;;
  *) exec c++ "\$@" ;;
esac
SH
chmod +x "$packed/c++"
export CARGO_TARGET_DIR=$build/rust/vendored
env -u MOEC_LIBRARY CXX="$packed/c++" PKG_CONFIG=/bin/false "$cargo" build --quiet --offline
said=$(env -u LD_LIBRARY_PATH -u MOEC_LIBRARY "$CARGO_TARGET_DIR/debug/readme")
[ "$said" = 0.01424 ] || die "README's program says $said; 0.01424 is right"
! readelf -d "$CARGO_TARGET_DIR/debug/readme" | grep -q libmoec ||
  die "the vendored program needs libmoec"
echo "test result: ok. 1 passed (README, vendored: nothing installed)" >>"$log"
said=$(! MOEC_NVCC=/nowhere/nvcc "$cargo" build --quiet --offline --features cuda 2>&1) ||
  die "the feature cuda is built without nvcc"
grep -qF "needs nvcc of CUDA 13, and /nowhere/nvcc was not found" <<<"$said" ||
  die "the feature cuda says $said without nvcc"
echo "test result: ok. 1 passed (cuda without nvcc)" >>"$log"
DOCS_RS=1 PKG_CONFIG=/bin/false RUSTDOCFLAGS="-D warnings" "$cargo" doc --quiet --offline \
  --no-deps -p moec
echo "test result: ok. 1 passed (documentation as docs.rs builds it)" >>"$log"

awk '/^test result:/ {for (i = 1; i < NF; i++) if ($(i + 1) ~ /^passed/) sum += $i}
  END {print sum " passed, 0 failed"}' "$log"
