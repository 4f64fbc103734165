#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_wheel_aarch64.sh: the wheel of `wheel.sh aarch64` in CPython 3.11 of Debian's aarch64, run by
# qemu: what it needs is unpacked once into build/aarch64-python, nothing is installed. Two families
# of `moec check`, and the wheel's libraries are of that processor.
. "$(dirname "$0")/lib.sh"
ls "$build"/wheel/moec_golden-*.whl >/dev/null 2>&1 || scripts/wheel.sh  # the stage "python" does
scripts/wheel.sh aarch64
wheel=$(echo "$build"/wheel-aarch64/moec-*-manylinux_*_aarch64.whl)
[ -e "$wheel" ] || die "$(ls "$build/wheel-aarch64") is not a manylinux wheel of aarch64"
place=$build/aarch64-python pins=$root/scripts/requirements.txt
tag=${wheel##*-}
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --python-version 3.11
  --only-binary :all: --platform "${tag%.whl}" --platform manylinux_2_28_aarch64
  --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64)
if [ "$(cat "$place/.stamp" 2>/dev/null)" != "$(sha256sum <"$pins")" ]; then
  rm -rf "$place"
  mkdir -p "$place"
  scripts/debian_tree.sh bookworm arm64 "$place/root" python3.11-minimal libpython3.11-stdlib \
    libstdc++6 dpkg- tar-
  retry "packages for CPython on aarch64" "${pip[@]}" --target "$place/packages" \
    --constraint "$pins" numpy ml_dtypes typer rich
  sha256sum <"$pins" >"$place/.stamp"
fi
outside=$(mktemp -d)
trap 'rm -rf "$outside"' EXIT
"${pip[@]}" --no-deps --no-index --target "$outside" "$wheel" "$build"/wheel/moec_golden-*.whl
for library in "$outside"/moec/*.so "$outside"/moec/lib/*.so*; do
  readelf -h "$library" | grep -q "Machine: *AArch64" || die "$library is not of aarch64"
done
cd "$outside"
export PYTHONPATH=$outside:$place/packages PYTHONHOME=$place/root/usr
qemu-aarch64 -cpu max -L "$place/root" "$place/root/usr/bin/python3.11" -m moec check \
  --family qwen3_moe --family gpt_oss
