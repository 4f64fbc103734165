# SPDX-License-Identifier: Apache-2.0
# Sourced by every script here: where things are, how to fail, how to download.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$root/build
venv=$build/venv
export PATH=$venv/bin:$PATH
export PYTHONDONTWRITEBYTECODE=1
cd "$root"

die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 1; }

# retry WHAT COMMAND...: run a command that downloads, up to three times. Its output is shown when
# the last try fails.
retry() {
  local what=$1 log tries=3 wait=5 try; shift
  log=$(mktemp)
  for try in $(seq $tries); do
    if "$@" >"$log" 2>&1; then rm -f "$log"; return 0; fi
    [ "$try" = $tries ] && break
    echo "download of $what failed; again in $wait s" >&2
    sleep $wait
    wait=$((wait * 4))
  done
  tail -n 25 "$log" >&2; rm -f "$log"
  echo "cannot download $what, see above; check the network and run the same command again" >&2
  return 1
}

# As many compilations as there are cores, and no more than one for each 1.5 GB of memory.
job_count() {
  local cores memory
  cores=$(nproc)
  memory=$(awk '/^MemAvailable/ {print int($2 / 1500000)}' /proc/meminfo)
  [ "$memory" -lt 1 ] && memory=1
  echo $((cores < memory ? cores : memory))
}

# cached FOLDER NAME: what build/FOLDER was configured with, if anything.
cached() { sed -nE "s/^$2:[A-Z]+=(.*)/\1/p" "$build/$1/CMakeCache.txt" 2>/dev/null || true; }
