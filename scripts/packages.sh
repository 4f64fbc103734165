#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# packages.sh: libmoec0, libmoec-dev and libmoec-cuda0 as .deb and .rpm and a relocatable .tar.gz of
# all three, into build/packages, from the objects of build/release: what is built there is not
# compiled again. zig links the libraries for glibc 2.28. Without a plug-in in build/release (no
# MOEC_CUDA) there is no libmoec-cuda0, and the last line says so.
. "$(dirname "$0")/lib.sh"
scripts/bootstrap.sh test >&2
MOEC_ZIG=$(scripts/zig.sh)
export MOEC_ZIG
release=$build/release out=$build/packages log=$build/log/packages.txt
mkdir -p "$build/log"
cached() { sed -nE "s/^$1:[A-Z]+=(.*)/\1/p" "$release/CMakeCache.txt" 2>/dev/null; }
[ "$(cached MOEC_ZIG)" = "$MOEC_ZIG" ] ||
  cmake --preset release --log-level=WARNING -DMOEC_ZIG="$MOEC_ZIG" >&2
targets=(moec_static moec_packaged) cuda=(-DMOEC_CUDA=OFF)
if [ "$(cached MOEC_CUDA)" = ON ]; then
  targets+=(moec_cuda_packaged)
  cuda=(-DMOEC_CUDA=ON -DCMAKE_CUDA_COMPILER="$(cached CMAKE_CUDA_COMPILER)")
fi
cmake --build "$release" -j "$(job_count)" --target "${targets[@]}" >&2

multiarch=$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null || echo "$(uname -m)-linux-gnu")
rm -rf "$out"
mkdir -p "$out"
: >"$log"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || date +%s)
export SOURCE_DATE_EPOCH
pack() { # pack GENERATOR LIBDIR OPTIONS...: its folders are laid out by a configuration of its own
  local folder=$build/packing/$1
  mkdir -p "$folder/lib"
  cp -au "$release"/lib/libmoec.* "$release/lib/packaged" "$folder/lib"
  {
    cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release -DMOEC_ZIG="$MOEC_ZIG" \
      "${cuda[@]}" -DCMAKE_INSTALL_PREFIX=/usr -DCMAKE_INSTALL_LIBDIR="$2" &&
      cpack --config "$folder/CPackConfig.cmake" -G "$1" -B "$folder/packed" "${@:3}"
  } >>"$log" 2>&1 || { tail -n 30 "$log" >&2; die "$1 cannot be packed; see ${log#"$root"/}"; }
  find "$folder/packed" -maxdepth 1 \( -name '*.deb' -o -name '*.rpm' -o -name '*.tar.gz' \) \
    -exec mv -t "$out" {} +
}
pack TGZ lib -D CPACK_COMPONENTS_GROUPING=ALL_COMPONENTS_IN_ONE
if command -v dpkg-shlibdeps >/dev/null; then pack DEB "lib/$multiarch"; else
  echo "packages.sh: no dpkg-dev here: no .deb" >&2
fi
if command -v rpmbuild >/dev/null; then pack RPM lib64; else
  echo "packages.sh: no rpmbuild here: no .rpm" >&2
fi
(cd "$out" && sha256sum -- * >SHA256SUMS && ls -s --block-size=K -- *)
[ ${#targets[@]} = 3 ] || echo "packages.sh: build/release has no CUDA plug-in: no libmoec-cuda0"
