#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_packages.sh [aarch64]: what packages.sh makes. Each kind is unpacked into a folder of its
# own, where the README's C program is compiled through pkg-config and CMake, shared and static, and
# run (aarch64: compiled across, and run by qemu); Debian's are installed into an empty root and
# purged, which leaves nothing, and lintian finds no error. Shown to fail: a package without its
# copyright.
# scripts/packages_on_debian.sh does the same with apt in a bare Debian.
. "$(dirname "$0")/lib.sh"
scripts/packages.sh "$@"
packages=$build/packages${1:+-$1}
cc=cc run=() machine=$(uname -m) across=()
if [ "${1:-}" = aarch64 ]; then
  cc=aarch64-linux-gnu-gcc run=(qemu-aarch64 -L /usr/aarch64-linux-gnu) machine=aarch64
  across=(--toolchain "$root/cmake/aarch64.cmake")
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0
done_with() { echo "ok: $*"; passed=$((passed + 1)); }
"$venv/bin/python" -c 'import sys; sys.path.insert(0, "tests/house"); import readme_c
print(readme_c.programs()[0])' >"$work/layer.c"

check_tree() { # check_tree NAME PREFIX LIBDIR
  local prefix=$2 libdir=$2/$3 flags target
  [ -e "$libdir/libmoec.so.0" ] || die "$1 has no $3/libmoec.so.0"
  "$venv/bin/python" scripts/check_shipped.py "$prefix"
  ! grep -rIl "$build" "$prefix" || die "$1 names the folder that it was built in"
  for library in "$libdir"/*.so.0; do
    readelf -h "$library" | grep -qiE "Machine: .*${machine/_/.}" ||
      die "$1: $(readelf -h "$library" | grep Machine:) in $library; $machine is right"
  done
  export PKG_CONFIG_PATH=$libdir/pkgconfig
  flags=$(pkg-config --cflags --libs moec)
  eval "$cc '$work/layer.c' -o '$work/shared' $flags"
  [ "$(LD_LIBRARY_PATH=$libdir "${run[@]}" "$work/shared")" = MOEC_OK ] ||
    die "$1: the program does not run"
  flags=$(pkg-config --static --cflags --libs moec)
  eval "$cc '$work/layer.c' -o '$work/static' ${flags/-lmoec/-l:libmoec.a}"
  [ "$(env -u LD_LIBRARY_PATH "${run[@]}" "$work/static")" = MOEC_OK ] ||
    die "$1: the static one does not run"
  for target in moec static; do
    mkdir -p "$work/$1-$target"
    cat >"$work/$1-$target/CMakeLists.txt" <<CMAKE
cmake_minimum_required(VERSION 3.18)
project(consumer LANGUAGES C)
find_package(moec 0.1 CONFIG REQUIRED)
add_executable(program "$work/layer.c")
target_link_libraries(program PRIVATE moec::$target)
CMAKE
    cmake -S "$work/$1-$target" -B "$work/$1-$target/build" "${across[@]}" \
      -Dmoec_DIR="$libdir/cmake/moec" >"$work/log"
    cmake --build "$work/$1-$target/build" >>"$work/log"
    [ "$("${run[@]}" "$work/$1-$target/build/program")" = MOEC_OK ] ||
      die "$1: moec::$target does not run"
  done
  done_with "$1"
}

mkdir "$work/tar"
tar xzf "$packages"/moec-*.tar.gz -C "$work/tar"
check_tree tar "$work/tar" lib
if compgen -G "$packages/*.rpm" >/dev/null; then
  mkdir "$work/rpm"
  for package in "$packages"/*.rpm; do
    rpm2archive - <"$package" | tar xzf - -C "$work/rpm"
  done
  check_tree rpm "$work/rpm/usr" lib64
fi
if command -v dpkg >/dev/null; then
  mkdir -p "$work/deb/var/lib/dpkg/"{info,updates,triggers} "$work/bin"
  : >"$work/deb/var/lib/dpkg/status"
  ln -s /bin/true "$work/bin/ldconfig"  # the packages' scripts run outside of their root
  debian() {
    PATH=$work/bin:/usr/sbin:/usr/bin:/sbin:/bin dpkg --root="$work/deb" --force-depends \
      --force-not-root --force-architecture --force-script-chrootless --log="$work/dpkg.log" \
      "$@" >>"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; die "dpkg $1 fails"; }
  }
  debian --install "$packages"/*.deb
  libdir=$(find "$work/deb/usr/lib" -name libmoec.so.0 -printf %h)
  check_tree deb "$work/deb/usr" "${libdir#"$work/deb/usr/"}"
  debian --purge libmoec0 libmoec-dev $(compgen -G "$packages/libmoec-cuda0*.deb" >/dev/null &&
    echo libmoec-cuda0)
  left=$(find "$work/deb" -path "$work/deb/var/lib/dpkg" -prune -o ! -type d -print)
  [ -z "$left" ] || die "purge leaves $left"
  done_with "deb, installed and purged"
  if command -v lintian >/dev/null; then
    lintian --allow-root --fail-on error "$packages"/*.deb
    done_with "lintian"
  else
    echo "no lintian here"
  fi
fi
(cd "$packages" && sha256sum --quiet -c SHA256SUMS)
echo "$passed passed, 0 failed"
