#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# julia.sh ARGUMENTS...: run the julia on PATH, else 1.5.3 of Debian 11, whose packages are unpacked
# once into build/julia: nothing is installed. `julia.sh --where` only says which it is; exit 127
# where there is neither a julia nor a Debian. `julia.sh --here` asks whether one is there without
# a download. `julia.sh --pack` writes build/julia_carry/part.*, each small enough to be carried
# alone; where these lie, Debian's julia is unpacked from them.
here=$PWD
. "$(dirname "$0")/lib.sh"
cd "$here"
folder=$build/julia
tree=$folder/root
carried=$build/julia_carry

unpack() {
  if compgen -G "$carried/part.*" >/dev/null; then
    rm -rf "$folder"
    mkdir -p "$folder"
    cat "$carried"/part.* | tar -C "$folder" --transform 's|^root|root.new|' -xJf -
    mv "$tree.new" "$tree"
    return
  fi
  # The C runtime and the package tools stay this system's own.
  "$root/scripts/debian_tree.sh" bullseye amd64 "$tree" julia libc6- libgcc-s1- \
    'libstdc++6-' libcrypt1- zlib1g- libselinux1- 'gcc-*-' dpkg- 'perl-*-' tar- 'debconf*-'
}

pack() {
  rm -rf "$carried"
  mkdir -p "$carried"
  tar -C "$folder" --exclude 'root/usr/share/[dm]*' -cf - root | xz -T0 |
    split -b 60M - "$carried/part."
  du -sh "$carried"
}

if [ "${1:-}" = --here ]; then
  command -v julia >/dev/null || [ -x "$tree/usr/bin/julia" ] ||
    compgen -G "$carried/part.*" >/dev/null || exit 1
  exit
fi
if [ "${1:-}" != --pack ] && found=$(command -v julia); then
  [ "${1:-}" = --where ] && { echo "$found"; exit; }
  exec "$found" "$@"
fi
if [ ! -x "$tree/usr/bin/julia" ]; then
  command -v apt-get >/dev/null || { echo "no julia on PATH, not on Debian" >&2; exit 127; }
  unpack >&2
fi
[ "${1:-}" = --where ] && { echo "build/julia (Debian 11's)"; exit; }
[ "${1:-}" = --pack ] && { pack; exit; }
lib=$tree/usr/lib/x86_64-linux-gnu
paths=$lib:$tree/lib/x86_64-linux-gnu:$lib/julia:$lib/openblas-pthread:$lib/blas:$lib/lapack
export LD_LIBRARY_PATH=$paths${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# Its libunwind.so.8 has names of libgcc's unwinder, and a C++ exception that crosses from one into
# the other aborts: let libgcc's come first.
export LD_PRELOAD=libgcc_s.so.1${LD_PRELOAD:+:$LD_PRELOAD}
exec "$tree/usr/bin/julia" "$@"
