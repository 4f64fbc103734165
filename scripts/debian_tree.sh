#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# debian_tree.sh SUITE ARCHITECTURE FOLDER PACKAGE...: unpack packages of a Debian, with all that
# they depend on, into FOLDER, which then is a tree of its own: nothing is installed. What matches a
# PATTERN that ends in a minus is left out. The mirror is the one that apt uses here.
here=$PWD
. "$(dirname "$0")/lib.sh"
[ $# -ge 4 ] || die "usage: debian_tree.sh SUITE ARCHITECTURE FOLDER PACKAGE... [PATTERN-...]"
suite=$1 architecture=$2 tree=$(cd "$here" && realpath -m "$3"); shift 3
wanted=() left_out=()
for name in "$@"; do
  case $name in *-) left_out+=("${name%-}") ;; *) wanted+=("$name") ;; esac
done
mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -E '/debian/?$' | head -n 1 || true)
[ -n "$mirror" ] || die "apt has no Debian mirror; run apt-get update"
work=$tree.work
rm -rf "$tree" "$work"
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/tree"
: >"$work/status"  # as if nothing were installed: every dependency is fetched
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" \
  >"$work/sources.list"
options=(-qq -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=-
  -o "Dir::State::lists=$work/lists" -o "Dir::State::status=$work/status"
  -o "Dir::Cache=$work/cache" -o Debug::NoLocking=1 -o "APT::Sandbox::User=$(id -un)"
  -o "APT::Architecture=$architecture" -o "APT::Architectures=$architecture")
retry "the package list of Debian $suite" apt-get "${options[@]}" update
retry "${wanted[*]} of Debian $suite" apt-get "${options[@]}" -y --no-install-recommends \
  --download-only install "${wanted[@]}"
for deb in "$work"/cache/archives/*.deb; do
  name=${deb##*/}
  for pattern in "${left_out[@]}"; do
    case ${name%%_*} in $pattern) continue 2 ;; esac
  done
  dpkg -x "$deb" "$work/tree"
done
mv "$work/tree" "$tree"
rm -rf "$work"
