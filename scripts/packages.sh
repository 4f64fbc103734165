#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# packages.sh [aarch64]: libmoec0, libmoec-dev and libmoec-cuda0 as .deb and .rpm and a relocatable
# .tar.gz of all three, into build/packages, of the libraries of packaged.sh; with aarch64, of those
# that are built across, into build/packages-aarch64. MOEC_CUDA=ON puts the plug-in among them; else
# there may be no libmoec-cuda0, and the last line says so. build/packages/Artifacts.toml is what
# Moec.jl finds every .tar.gz by that was made (julia_artifacts.sh).
. "$(dirname "$0")/lib.sh"
scripts/bootstrap.sh test >&2
preset=${1:-release}
processor=${1:-$(uname -m)}
tree=$(scripts/packaged.sh "$preset")
out=$build/packages${1:+-$1} log=$build/log/packages${1:+-$1}.txt
cuda=OFF nvcc=
if [ "$(cached "$preset" MOEC_CUDA)" = ON ]; then
  cuda=ON nvcc=$(cached "$preset" CMAKE_CUDA_COMPILER)
fi
mkdir -p "$build/log"
rm -rf "$out"
mkdir -p "$out"
: >"$log"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || date +%s)
export SOURCE_DATE_EPOCH
pack() { # pack GENERATOR LIBDIR OPTIONS...: its folders are laid out by a configuration of its own
  local folder=$build/packing/$processor/$1
  # CMake would forget the other options where the compiler is another one.
  [ "$(cached "packing/$processor/$1" CMAKE_CUDA_COMPILER)" = "$nvcc" ] || rm -rf "$folder"
  mkdir -p "$folder/lib"
  cp -au "$tree"/lib/libmoec.* "$tree/lib/packaged" "$folder/lib"
  {
    cmake --preset "$preset" -B "$folder" -DMOEC_DEVELOPER=OFF -DMOEC_ZIG="$(scripts/zig.sh)" \
      -DMOEC_CUDA=$cuda -DCMAKE_CUDA_COMPILER="$nvcc" \
      -DCMAKE_INSTALL_PREFIX=/usr -DCMAKE_INSTALL_LIBDIR="$2" &&
      cpack --config "$folder/CPackConfig.cmake" -G "$1" -B "$folder/packed" "${@:3}"
  } >>"$log" 2>&1 || { tail -n 30 "$log" >&2; die "$1 cannot be packed; see ${log#"$root"/}"; }
  find "$folder/packed" -maxdepth 1 \( -name '*.deb' -o -name '*.rpm' -o -name '*.tar.gz' \) \
    -exec mv -t "$out" {} +
}
pack TGZ lib -D CPACK_COMPONENTS_GROUPING=ALL_COMPONENTS_IN_ONE
pack DEB "lib/$processor-linux-gnu"
if command -v rpmbuild >/dev/null; then pack RPM lib64; else
  echo "packages.sh: no rpmbuild here: no .rpm" >&2
fi
(cd "$out" && sha256sum -- * >SHA256SUMS && ls -s --block-size=K -- *)
mkdir -p "$build/packages"
scripts/julia_artifacts.sh >"$build/packages/Artifacts.toml"
[ $cuda = ON ] || echo "packages.sh: no libmoec-cuda0; MOEC_CUDA=ON makes it"
