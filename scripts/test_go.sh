#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_go.sh: the Go package through cgo with the race detector (and its pointer checks), through
# purego without cgo, vet and gofmt; then examples/go in a module outside the tree, which gets the
# package as a zip from a module proxy on disk, built both ways; and README's program with the
# module that carries the library, where none is installed, for this machine and for aarch64.
. "$(dirname "$0")/lib.sh"
prefix=$(scripts/install_for_bindings.sh)
go=$root/scripts/go.sh
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig LD_LIBRARY_PATH=$prefix/lib
export MOEC_LIBRARY=$prefix/lib/libmoec.so.0
# Go's build cache, which all checkouts share, asks neither pkg-config nor the header again: what it
# keeps may be of another checkout's library, or of another moec.h. These flags are part of its key.
export CGO_LDFLAGS="-O2 -g '-L$prefix/lib'"
CGO_CFLAGS="-O2 -g -DMOEC_HEADER=$(sha256sum <"$prefix/include/moec/moec.h" | cut -c 1-16)"
export CGO_CFLAGS
log=$build/bindings/go.txt
: >"$log"

cd bindings/go
retry "the Go modules of bindings/go" "$go" mod download
unformatted=$("$("$go" env GOROOT)/bin/gofmt" -l *.go lib/*.go raw/check.go raw/load*.go)
[ -z "$unformatted" ] || die "gofmt would change: $unformatted"
"$go" vet ./...
for processor in amd64 arm64; do
  CGO_ENABLED=0 GOARCH=$processor "$go" vet -tags moec_purego ./...
done
"$go" test -race -count=1 -v ./... | tee -a "$log"
CGO_ENABLED=0 "$go" test -tags moec_purego -count=1 -v ./... | tee -a "$log"

# A proxy on disk: version 0.1.0 of the working tree, and what the module cache has of others.
outside=$(mktemp -d)
trap 'chmod -R u+w "$outside"; rm -rf "$outside"' EXIT
library=$("$root/scripts/go_library.sh")
"$venv/bin/python" - "$outside/proxy" "$library" <<'PYTHON'
import pathlib, sys, zipfile
def publish(module, folder, files):
    target = pathlib.Path(sys.argv[1], module, "@v")
    target.mkdir(parents=True)
    (target / "v0.1.0.info").write_text('{"Version": "v0.1.0"}')
    (target / "v0.1.0.mod").write_bytes((folder / "go.mod").read_bytes())
    with zipfile.ZipFile(target / "v0.1.0.zip", "w", zipfile.ZIP_DEFLATED) as package:
        for path in files:
            package.write(path, f"{module}@v0.1.0/{path.relative_to(folder)}")
here, library = pathlib.Path(), pathlib.Path(sys.argv[2])
own = [p for p in here.rglob("*.go") if p.parts[0] != "lib"]
publish("moec.dev/moec", here, [*own, here / "go.mod", here / "go.sum"])
publish("moec.dev/moec/lib", library, [p for p in library.rglob("*") if p.is_file()])
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
mkdir "$outside/pages"
for page in $("$venv/bin/python" "$root/scripts/page_code.py" go "$outside/pages"); do
  name=$(basename "$page" .go)
  [ -z "$("$("$go" env GOROOT)/bin/gofmt" -l "$page")" ] || die "gofmt would change docs, $name"
  mkdir "$name" && cp "$page" "$name/main.go"
  CGO_ENABLED=0 "$go" build -o "page_$name" "./$name"
  env -u LD_LIBRARY_PATH "./page_$name" && echo "--- PASS: docs, $name" >>"$log"
done
"$root/scripts/wrong_library.sh" env -u LD_LIBRARY_PATH ./train_purego
echo "--- PASS: another ABI is refused" >>"$log"
! readelf -d train_purego | grep -q moec || die "the purego program is linked to libmoec"

# README's program, and the import that carries the library; without cgo, as without a C compiler.
mkdir "$outside/readme" "$outside/cache"
cd "$outside/readme"
awk '/^```$/ {if (inside) exit} inside {print} /^```go$/ {inside = 1}' \
  "$root/bindings/go/README.md" >main.go
[ -z "$("$("$go" env GOROOT)/bin/gofmt" -l main.go)" ] || die "gofmt would change README's program"
printf 'package main\n\nimport _ "moec.dev/moec/lib"\n' >lib.go
cat >go.mod <<'GO'
module readme

go 1.21

require (
	moec.dev/moec v0.1.0
	moec.dev/moec/lib v0.1.0
)
GO
bare=(env -u LD_LIBRARY_PATH -u MOEC_LIBRARY)
CGO_ENABLED=0 "$go" build -o readme .
said=$(XDG_CACHE_HOME=$outside/cache "${bare[@]}" ./readme)
[ "$said" = "<nil> 0.05695" ] || die "README's program says $said with the library that it carries"
[ "$(find "$outside/cache" -name libmoec.so.0 | wc -l)" = 1 ] || die "the cache has no libmoec.so.0"
echo "--- PASS: README, the library embedded" >>"$log"
find "$outside/cache" -name libmoec.so.0 -exec truncate -s 100 {} +
XDG_CACHE_HOME=$outside/cache "${bare[@]}" ./readme | grep -qF 0.05695 ||
  die "a damaged library in the cache is not written again"
echo "--- PASS: README, a damaged cache" >>"$log"
CGO_ENABLED=0 GOARCH=arm64 "$go" build -o readme_arm64 .
said=$(XDG_CACHE_HOME=$outside/cache_arm64 "${bare[@]}" qemu-aarch64 -L /usr/aarch64-linux-gnu \
  ./readme_arm64)
[ "$said" = "<nil> 0.05695" ] || die "README's program says $said on aarch64"
echo "--- PASS: README, the library embedded, aarch64" >>"$log"
mkdir "$outside/readme/said"
cat >said/main.go <<'GO'
package main

import (
	"fmt"

	"moec.dev/moec"
	_ "moec.dev/moec/lib"
)

func main() {
	_, err := moec.NewContext(nil)
	fmt.Println(err)
}
GO
CGO_ENABLED=0 "$go" build -o says ./said
refused() { # refused CACHE WORDS: what a program says that may not keep its library there
  XDG_CACHE_HOME=$1 "${bare[@]}" ./says | tee "$outside/said.txt" | grep -qF "$2" ||
    { cat "$outside/said.txt" >&2; die "the error is not clear"; }
}
refused /proc/nowhere "cannot write libmoec.so.0: mkdir /proc/nowhere: no such file or directory; \
set XDG_CACHE_HOME"
echo "--- PASS: no cache folder" >>"$log"
mkdir "$outside/noexec"
if mount -t tmpfs -o noexec tmpfs "$outside/noexec" 2>/dev/null; then
  trap 'umount "$outside/noexec"; chmod -R u+w "$outside"; rm -rf "$outside"' EXIT
  refused "$outside/noexec" "forbids programs (noexec)"
  echo "--- PASS: a cache folder that cannot execute" >>"$log"
fi

echo "$(grep -cE '^ *--- PASS' "$log") passed, $(grep -cE '^ *--- FAIL' "$log") failed"
