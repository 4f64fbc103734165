#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# wheel_on_debian11.sh DIR: what build/wheel's wheel of moec holds, in a bare Debian 11 (glibc 2.31,
# gcc 10): the README's C program, compiled there through the wheel's moec.pc, runs, and the CUDA
# plug-in opens and says what it lacks. DIR/debian11 is made once by debootstrap from the mirror
# that apt uses here. Needs root. Python is not part of it: Debian 11 has 3.9.
here=$PWD
. "$(dirname "$0")/lib.sh"
[ $# = 1 ] || die "usage: wheel_on_debian11.sh DIR"
[ "$(id -u)" = 0 ] || die "chroot needs root"
bare=$(cd "$here" && realpath -m "$1")/debian11
mirror=$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' |
  awk '$1 == "bookworm" {print $2; exit}')
[ -n "$mirror" ] || die "apt has no source of Debian here; run apt-get update first"
command -v debootstrap >/dev/null || retry debootstrap apt-get install -y debootstrap
if [ ! -e "$bare/.ready" ]; then
  rm -rf "$bare"
  retry "a bare Debian 11" debootstrap --variant=minbase --include=gcc,libc6-dev,pkg-config \
    bullseye "$bare" "$mirror"
  touch "$bare/.ready"
fi
rm -rf "$bare/moec"
python3 -m zipfile -e "$build"/wheel/moec-*.whl "$bare/moec"
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
chroot "$bare" env -i PATH=/usr/bin:/bin PKG_CONFIG_PATH=/moec/moec/lib/pkgconfig sh -e -c '
  cd /moec
  for program in layer gpu; do
    cc $program.c $(pkg-config --cflags --libs moec) -o $program
    ./$program
  done' | tee "$build/log/debian11.txt"
grep -qx MOEC_OK "$build/log/debian11.txt" || die "the C program does not run"
grep -q '"plugin": "/moec/moec/lib/libmoec_cuda.so.0"' "$build/log/debian11.txt" ||
  die "the plug-in does not open"
echo "2 passed, 0 failed: Debian $(cat "$bare/etc/debian_version")"
