#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# bare_debian.sh DIR COMMAND...: run a command (make demo, make test) on a clone of HEAD inside a
# bare Debian 12 that holds nothing but `make`. DIR/base is made once by debootstrap from the mirror
# that apt uses here; DIR/root is a fresh copy of it each time. Needs root; prints the time it took.
here=$PWD
. "$(dirname "$0")/lib.sh"
[ $# -ge 2 ] || die "usage: bare_debian.sh DIR COMMAND..."
[ "$(id -u)" = 0 ] || die "chroot needs root"
folder=$(cd "$here" && realpath -m "$1"); shift
base=$folder/base bare=$folder/root
mirror=$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' |
  awk '$1 == "bookworm" {print $2; exit}')
[ -n "$mirror" ] || die "apt has no source for bookworm here; run apt-get update first"
command -v debootstrap >/dev/null || retry debootstrap apt-get install -y debootstrap

if [ ! -e "$base/.ready" ]; then
  rm -rf "$base"
  retry "a bare Debian 12" debootstrap --variant=minbase --include=make,ca-certificates bookworm \
    "$base" "$mirror"
  touch "$base/.ready"
fi
mountpoint -q "$bare/proc" && umount "$bare/proc"
mountpoint -q "$bare/dev" && umount "$bare/dev"
rm -rf "$bare"
cp -a "$base" "$bare"

# A Debian 12 has its security suite, too.
security=$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' |
  awk '$1 == "bookworm-security" {print $2; exit}')
[ -z "$security" ] || echo "deb $security bookworm-security main" >>"$bare/etc/apt/sources.list"

# What lets this machine reach its package sources is not part of the test: take it along.
cp -L /etc/resolv.conf /etc/hosts "$bare/etc/"
cp -L /etc/ssl/certs/ca-certificates.crt "$bare/etc/ssl/certs/"
grep -lsi acquire /etc/apt/apt.conf.d/* | xargs -r cp -t "$bare/etc/apt/apt.conf.d/"
mapfile -t settings < <(env | grep -E '^(PIP_|SSL_CERT|REQUESTS_CA|[a-z]+_proxy|[A-Z]+_PROXY)')

git clone -q "$root" "$bare/moec"
mount --bind /dev "$bare/dev"
mount -t proc proc "$bare/proc"
trap 'umount "$bare/proc" "$bare/dev"' EXIT
begin=$SECONDS status=0
chroot "$bare" env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin TERM=dumb "${settings[@]}" \
  sh -c 'cd /moec && "$@"' sh "$@" </dev/null || status=$?
echo "$*: exit $status after $((SECONDS - begin)) s on a bare Debian 12"
exit $status
