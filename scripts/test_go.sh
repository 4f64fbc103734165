#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_go.sh: the Go package through cgo with the race detector (and its pointer checks), through
# purego without cgo, vet and gofmt; then examples/go in a module outside the tree, which gets the
# package as a zip from a module proxy on disk, built both ways.
. "$(dirname "$0")/lib.sh"
prefix=$(scripts/install_for_bindings.sh)
go=$root/scripts/go.sh
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig LD_LIBRARY_PATH=$prefix/lib
export MOEC_LIBRARY=$prefix/lib/libmoec.so.0
# Go's build cache, which all checkouts share, does not ask pkg-config again: what it keeps may be
# linked to another checkout's library. These flags are part of its key.
export CGO_LDFLAGS="-O2 -g '-L$prefix/lib'"
log=$build/bindings/go.txt
: >"$log"

cd bindings/go
retry "the Go modules of bindings/go" "$go" mod download
unformatted=$("$("$go" env GOROOT)/bin/gofmt" -l *.go raw/check.go raw/load*.go)
[ -z "$unformatted" ] || die "gofmt would change: $unformatted"
"$go" vet ./...
CGO_ENABLED=0 "$go" vet -tags moec_purego ./...
"$go" test -race -count=1 -v ./... | tee -a "$log"
CGO_ENABLED=0 "$go" test -tags moec_purego -count=1 -v ./... | tee -a "$log"

# A proxy on disk: version 0.1.0 of the working tree, and what the module cache has of others.
outside=$(mktemp -d)
trap 'chmod -R u+w "$outside"; rm -rf "$outside"' EXIT
"$venv/bin/python" - "$outside/proxy/moec.dev/moec/@v" <<'PYTHON'
import pathlib, sys, zipfile
target = pathlib.Path(sys.argv[1])
target.mkdir(parents=True)
(target / "v0.1.0.info").write_text('{"Version": "v0.1.0"}')
(target / "v0.1.0.mod").write_bytes(pathlib.Path("go.mod").read_bytes())
with zipfile.ZipFile(target / "v0.1.0.zip", "w") as package:
    for path in [*pathlib.Path().rglob("*.go"), pathlib.Path("go.mod"), pathlib.Path("go.sum")]:
        package.write(path, f"moec.dev/moec@v0.1.0/{path}")
PYTHON
cp -r "$root/examples/go" "$outside/train"
cd "$outside/train"
cache=$("$go" env GOMODCACHE)/cache/download
export GOPROXY=file://$outside/proxy,file://$cache GOMODCACHE=$outside/modules
export GOSUMDB=off GOFLAGS=-mod=mod
"$go" build -o train .
env -u MOEC_LIBRARY ./train && echo "--- PASS: example, cgo" >>"$log"
CGO_ENABLED=0 "$go" build -tags moec_purego -o train_purego .
env -u LD_LIBRARY_PATH ./train_purego && echo "--- PASS: example, purego" >>"$log"
"$root/scripts/wrong_library.sh" env -u LD_LIBRARY_PATH ./train_purego
echo "--- PASS: another ABI is refused" >>"$log"
! readelf -d train_purego | grep -q moec || die "the purego program is linked to libmoec"

echo "$(grep -cE '^ *--- PASS' "$log") passed, $(grep -cE '^ *--- FAIL' "$log") failed"
