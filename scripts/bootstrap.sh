#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# bootstrap.sh [test|docs|tools]: make sure that this machine has what `make demo` (or that target,
# or the house's tools) needs: Debian packages, then build/venv with pinned tools, of which a demo
# needs half. Silent and quick when all is there.
. "$(dirname "$0")/lib.sh"
purpose=${1:-demo}

# What must hold | the package that makes it so. Checks ask for the thing, not the package, so that
# another compiler or Python on PATH is as good.
python_include='import sysconfig; print(sysconfig.get_path("include"))'
needs=(
  'command -v g++|g++'
  'command -v make|make'
  'command -v python3|python3'
  'python3 -c "import venv, ensurepip"|python3-venv'
  'test -f "$(python3 -c "$python_include")/Python.h"|python3-dev'
  'test -d /etc/ssl/certs -a -n "$(ls -A /etc/ssl/certs)"|ca-certificates'
)
[ "$purpose" = test ] && needs+=(
  'command -v clang++|clang'
  'command -v pkg-config|pkg-config'
  'test -f /usr/include/gtest/gtest.h -a -d /usr/src/googletest/googletest|libgtest-dev'
  'test -f /usr/include/benchmark/benchmark.h|libbenchmark-dev'
  'command -v qemu-x86_64 || command -v qemu-x86_64-static|qemu-user'
  'command -v qemu-aarch64 || command -v qemu-aarch64-static|qemu-user'
  'command -v aarch64-linux-gnu-gcc|gcc-aarch64-linux-gnu'
  'command -v aarch64-linux-gnu-g++|g++-aarch64-linux-gnu'
  'command -v git|git'
  'command -v mpirun|openmpi-bin'
  'command -v mpicc|libopenmpi-dev'
  'command -v rpmbuild|rpm'
  'command -v lintian|lintian'
  'rustc --version | grep -qE " 1[.](8[7-9]|9[0-9]|[1-9][0-9]{2})[.]"|rustc-web'  # security suite
  'cargo --version|cargo-web'
  'cargo clippy --version|rust-web-clippy'
  'command -v curl || command -v wget|curl'  # without one, julia's Pkg does not even start
)

case $purpose in test | docs) needs+=('command -v doxygen|doxygen') ;; esac

# Better now than ten minutes from now: half of it is PyTorch with its CUDA libraries.
mkdir -p "$build"
if [ "$purpose" = test ]; then
  held=$(du -sk "$build" | cut -f 1) free=$(df -k --output=avail "$build" | tail -n 1)
  [ $((held + free)) -ge 10000000 ] ||
    die "all tests need 10 GB in build/: it holds $((held / 1000000)), $((free / 1000000)) are" \
      "free; make room and run the same command again"
fi

missing=()
for need in "${needs[@]}"; do
  (eval "${need%|*}") >/dev/null 2>&1 || missing+=("${need##*|}")
done

if [ ${#missing[@]} -gt 0 ]; then
  line="apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
  command -v apt-get >/dev/null ||
    die "missing: ${missing[*]}; install them (this is not Debian) and run again"
  if [ "$(id -u)" = 0 ]; then as_root=env
  elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then as_root=sudo
  else die "missing Debian packages; run this as root, then the same command again:
  $line"
  fi
  echo "installing Debian packages: ${missing[*]}"
  retry "Debian's package lists" $as_root apt-get update
  retry "Debian packages ${missing[*]}" $as_root DEBIAN_FRONTEND=noninteractive \
    apt-get install -y --no-install-recommends "${missing[@]}"
fi

python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  die "python3 is $(python3 --version 2>&1); 3.11 or later is needed"
lists=(requirements.txt)
[ "$purpose" = demo ] || lists+=(requirements_test.txt)
for list in "${lists[@]}"; do
  stamp=$(cat "scripts/$list" <(python3 --version) | sha256sum)
  [ "$(cat "$venv/.$list" 2>/dev/null)" != "$stamp" ] || continue
  echo "installing the pinned tools of scripts/$list into build/venv"
  if [ "$list" = requirements.txt ]; then
    python=$(python3 -c 'import sys; print(sys.executable)')
    case $python in "$venv"/*) python=$(readlink -f "$venv/bin/python3");; esac
    rm -rf "$venv"
    "$python" -m venv "$venv"
  fi
  retry "the Python packages of scripts/$list" "$venv/bin/python" -m pip install \
    --disable-pip-version-check --no-deps -r "scripts/$list"
  echo "$stamp" >"$venv/.$list"
done
