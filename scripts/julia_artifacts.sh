#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# julia_artifacts.sh [URL]: print the Artifacts.toml that Moec.jl is released with: the .tar.gz of
# each processor that packages.sh has made, with its hash, the hash of the tree that is in it, and
# where it will be (URL/NAME). Lazy: it is downloaded when the library is first wanted.
. "$(dirname "$0")/lib.sh"
# The hash is of the files as they are, whatever the user's Git is told to do with links or lines.
unset "${!GIT_@}"
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null
version=$(sed -nE 's/^project\(moec VERSION ([0-9.]+).*/\1/p' CMakeLists.txt)
url=${1:-https://moec.dev/moec/releases/$version}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "# Made by scripts/julia_artifacts.sh."
for archive in "$build"/packages/moec-*.tar.gz "$build"/packages-*/moec-*.tar.gz; do
  [ -e "$archive" ] || continue
  processor=${archive##*-linux-} tree=$work/${archive##*/}
  processor=${processor%.tar.gz}
  mkdir "$tree"
  tar xzf "$archive" -C "$tree"
  git init -q "$tree"
  git -C "$tree" add --all --force
  cat <<TOML

[[libmoec]]
arch = "$processor"
git-tree-sha1 = "$(git -C "$tree" write-tree)"
lazy = true
libc = "glibc"
os = "linux"

    [[libmoec.download]]
    sha256 = "$(sha256sum "$archive" | cut -d ' ' -f 1)"
    url = "$url/${archive##*/}"
TOML
done
