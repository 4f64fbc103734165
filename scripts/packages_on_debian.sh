#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# packages_on_debian.sh DIR: build/packages' .deb in a bare Debian 12. apt installs them; the
# README's C program is compiled through pkg-config and CMake, shared and static, and runs; the CUDA
# plug-in, where it was packed, opens and says what it lacks; apt purge leaves nothing. DIR/packages
# is made once by debootstrap from the mirror that apt uses here. Needs root.
here=$PWD
. "$(dirname "$0")/lib.sh"
[ $# = 1 ] || die "usage: packages_on_debian.sh DIR"
[ "$(id -u)" = 0 ] || die "chroot needs root"
compgen -G "$build/packages/*.deb" >/dev/null || die "no .deb in build/packages; run make packages"
bare=$(cd "$here" && realpath -m "$1")/packages
mirror=$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' |
  awk '$1 == "bookworm" {print $2; exit}')
[ -n "$mirror" ] || die "apt has no source for bookworm here; run apt-get update first"
command -v debootstrap >/dev/null || retry debootstrap apt-get install -y debootstrap
if [ ! -e "$bare/.ready" ]; then
  rm -rf "$bare"
  retry "a bare Debian 12" debootstrap --variant=minbase \
    --include=gcc,libc6-dev,libstdc++-12-dev,pkg-config,cmake,make bookworm "$bare" "$mirror"
  touch "$bare/.ready"
fi
rm -rf "$bare/moec"
mkdir "$bare/moec"
cp "$build"/packages/*.deb "$bare/moec"
"$venv/bin/python" -c 'import sys; sys.path.insert(0, "tests/house"); import readme_c
print(readme_c.programs()[0])' >"$bare/moec/layer.c"
cat >"$bare/moec/gpu.c" <<'C'
#include <moec/moec.h>
#include <stdio.h>
int main(void) {
  char text[4096];
  uint64_t need;
  const moec_status status = moec_backend_describe(MOEC_CUDA, text, sizeof text, &need);
  puts(status ? moec_status_name(status) : text);
  return status;
}
C
cat >"$bare/moec/CMakeLists.txt" <<'CMAKE'
cmake_minimum_required(VERSION 3.18)
project(consumer LANGUAGES C)
find_package(moec 0.1 CONFIG REQUIRED)
foreach(target moec static)
  add_executable(by_cmake_${target} layer.c)
  target_link_libraries(by_cmake_${target} PRIVATE moec::${target})
endforeach()
CMAKE
cat >"$bare/moec/run.sh" <<'SH'
cd /moec
files() {
  find / -xdev \( -path /moec -o -path /tmp -o -path /var/cache -o -path /var/log \
    -o -path /var/lib/apt \) -prune -o -print | sort
  ldconfig -p | grep libmoec || true
  dpkg-query -W -f '${Package} ${Status}\n' | grep libmoec || true
}
files >before
apt-get install -y --no-install-recommends ./*.deb
ldconfig -p | grep -q 'libmoec.so.0 ' || { echo "ldconfig does not know libmoec.so.0"; exit 1; }
cc layer.c $(pkg-config --cflags --libs moec) -o shared
cc layer.c -static-libgcc $(pkg-config --static --cflags --libs moec |
  sed 's/-lmoec/-l:libmoec.a/') -o static
cmake -S . -B build >cmake.log
cmake --build build >>cmake.log
for program in shared static build/by_cmake_moec build/by_cmake_static; do
  echo "$program: $(./$program)"
done
cc gpu.c $(pkg-config --cflags --libs moec) -o gpu
./gpu
apt-get purge -y 'libmoec*'
files >after
diff before after && echo "purge leaves nothing"
SH
chroot "$bare" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive HOME=/root \
  sh -e /moec/run.sh </dev/null 2>&1 | tee "$build/log/packages_on_debian.txt"
passed=$(grep -c ': MOEC_OK$' "$build/log/packages_on_debian.txt" || true)
[ "$passed" = 4 ] || die "$passed of 4 programs run"
grep -qx "purge leaves nothing" "$build/log/packages_on_debian.txt" || die "purge leaves files"
if compgen -G "$build/packages/libmoec-cuda0*.deb" >/dev/null; then
  grep -q '"plugin": "/usr/lib/.*/libmoec_cuda.so.0' "$build/log/packages_on_debian.txt" ||
    die "the plug-in does not open"
fi
echo "5 passed, 0 failed: Debian $(cat "$bare/etc/debian_version")"
