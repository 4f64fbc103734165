#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_rust.sh: tests and documentation examples with the default and with all features (bindgen
# runs, the library is opened at run time, and the committed bindings must equal bindgen's output),
# those of moec-sys with dynamic alone; then the crates are packed, and examples/rust and the
# programs of docs/ are built from the packed files alone, and run without LD_LIBRARY_PATH; and
# README's program with the feature vendored, where no library is installed. Clippy compiles all of
# it, without a warning. One target folder serves all: what others wrote is compiled once.
. "$(dirname "$0")/lib.sh"
prefix=$(scripts/install_for_bindings.sh)
cargo=$root/scripts/cargo.sh
log=$build/bindings/rust.txt
: >"$log"

cd bindings/rust
retry "the crates of bindings/rust" "$cargo" fetch --locked
cargo fmt --version >/dev/null 2>&1 && "$cargo" fmt --all --check
export RUSTC_WORKSPACE_WRAPPER=clippy-driver  # compiles, too; cargo.sh denies warnings
for features in "" "--features dynamic" "--all-features"; do
  library=
  [ -z "$features" ] || library=$prefix/lib/libmoec.so.0  # only these open it at run time
  packages=--workspace
  [ "$features" != "--features dynamic" ] || packages="-p moec-sys"  # all features open it, too
  MOEC_LIBRARY=$library "$cargo" test --quiet --offline $packages $features | tee -a "$log"
done
"$root/scripts/wrong_library.sh" "$cargo" test --quiet --offline -p moec-sys --features dynamic \
  --test layout the_library
echo "test result: ok. 1 passed (another ABI is refused)" >>"$log"
# As the site for documentation of crates builds it, where no library is.
DOCS_RS=1 PKG_CONFIG=/bin/false RUSTDOCFLAGS="-D warnings" "$cargo" doc --quiet --offline \
  --no-deps --features ndarray
echo "test result: ok. 1 passed (documentation as docs.rs builds it)" >>"$log"

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
# In one place, where only what changed is written: only that is compiled.
packed=$build/rust/packed
for name in moec-0.1.0 moec-sys-0.1.0 train; do
  "$venv/bin/python" "$root/scripts/same_tree.py" "$outside/$name" "$packed/$name"
done
cd "$packed/train"
train=$build/rust/debug/train
build_outside() {
  "$cargo" build --quiet --offline --config 'patch.crates-io.moec.path="../moec-0.1.0"' \
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

# README's first program on the packed crates. Their library is what build/release compiled from the
# same bytes. packed_cxx.py was shown a missing header, one that differs, and another flag.
mkdir -p "$packed/readme/src"
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
export PACKED=$packed/moec-sys-0.1.0/vendor CXX=$root/scripts/packed_cxx.py
env -u MOEC_LIBRARY PKG_CONFIG=/bin/false "$cargo" build --quiet --offline
readme=$build/rust/debug/readme
said=$(env -u LD_LIBRARY_PATH -u MOEC_LIBRARY "$readme")
[ "$said" = 0.01424 ] || die "README's program says $said; 0.01424 is right"
! readelf -d "$readme" | grep -q libmoec || die "the vendored program needs libmoec"
echo "test result: ok. 1 passed (README, vendored: nothing installed)" >>"$log"
said=$(! MOEC_NVCC=/nowhere/nvcc "$cargo" build --quiet --offline --features cuda 2>&1) ||
  die "the feature cuda is built without nvcc"
grep -qF "needs nvcc of CUDA 13, and /nowhere/nvcc was not found" <<<"$said" ||
  die "the feature cuda says $said without nvcc"
echo "test result: ok. 1 passed (cuda without nvcc)" >>"$log"

awk '/^test result:/ {for (i = 1; i < NF; i++) if ($(i + 1) ~ /^passed/) sum += $i}
  END {print sum " passed, 0 failed"}' "$log"
