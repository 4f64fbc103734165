#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_julia.sh: Moec.jl developed into a new environment of a new depot whose only registry is
# empty (nothing but the standard library can be found) and tested there by Pkg.test; the programs
# of examples/julia, of the README and of docs/; the static check, which knows every function; and
# Moec added from a registry to another new depot, where it downloads what packages.sh made.
. "$(dirname "$0")/lib.sh"
prefix=$(scripts/install_for_bindings.sh)
"$venv/bin/python" bindings/julia/test/static_check.py >"$build/bindings/julia.txt" ||
  { cat "$build/bindings/julia.txt"; die "Moec.jl is not what api.json says"; }
checks=$(tail -n 1 "$build/bindings/julia.txt")

status=0
where=$(scripts/julia.sh --where) || status=$?
if [ $status = 127 ]; then
  echo "NO JULIA HERE: only the static check ran"
  echo "$checks, 1 skipped"
  exit 0
fi
[ $status = 0 ] || die "julia cannot be unpacked"
outside=$(mktemp -d)
trap 'rm -rf "$outside"' EXIT
mkdir -p "$outside/bindings" "$outside/depot/registries/Empty"
cp -r bindings/julia "$outside/bindings/julia"
ln -s "$root/bindings/api.json" "$outside/bindings/api.json"
ln -s "$root/tests" "$outside/tests"
ln -s "$root/docs" "$outside/docs"
cat >"$outside/depot/registries/Empty/Registry.toml" <<'TOML'
name = "Empty"
uuid = "6a3b3c52-4d4e-4f1e-9f54-0c1d2f6f0a11"
repo = "file:///nowhere"

[packages]
TOML
# README.md's program is its first julia block.
awk '/^```$/ {if (inside) exit} inside {print} /^```julia$/ {inside = 1}' bindings/julia/README.md \
  >"$outside/readme.jl"
[ -s "$outside/readme.jl" ] || die "bindings/julia/README.md has no julia program"
cp examples/julia/train.jl "$outside"
pages=$("$venv/bin/python" scripts/page_code.py julia "$outside" | xargs -n 1 basename)
programs=(readme.jl train.jl $pages)

cat >"$outside/run.jl" <<'JULIA'
using Pkg
VERSION >= v"1.5" && Pkg.offline(true)
Pkg.activate(joinpath(@__DIR__, "environment"))
Pkg.develop(PackageSpec(path = joinpath(@__DIR__, "bindings", "julia")))
Pkg.test("Moec", julia_args = `-O0`)
for program in ARGS
    include(joinpath(@__DIR__, program))
    println(program, " ran")
end
JULIA
log=$outside/log.txt
export JULIA_DEPOT_PATH=$outside/depot JULIA_PKG_SERVER= MOEC_LIBRARY=$prefix/lib/libmoec.so.0
timeout 600 scripts/julia.sh -O0 --startup-file=no "$outside/run.jl" "${programs[@]}" \
  2>&1 | tee "$log"
echo "executed with $where"
scripts/wrong_library.sh scripts/julia.sh -O0 --startup-file=no --project="$outside/environment" \
  -e 'using Moec'
! MOEC_LIBRARY=/nowhere/libmoec.so.0 scripts/julia.sh -O0 --startup-file=no \
  --project="$outside/environment" -e 'using Moec' >"$outside/missing.txt" 2>&1 ||
  die "a library that is not there is accepted"
grep -q "/nowhere.*; set MOEC_LIBRARY" "$outside/missing.txt" ||
  { cat "$outside/missing.txt" >&2; die "the error is not clear"; }
passed=$(sed -nE 's/^Moec +\| +([0-9]+) +.*/\1/p' "$log")
[ "$(grep -c ' ran$' "$log")" = ${#programs[@]} ] || die "a program did not run"
[ "${passed:-0}" -gt 500 ] || die "Pkg.test ran ${passed:-no} tests"

# Released: a repository of the package with its Artifacts.toml, a registry that knows it, and the
# archives on a server of this machine. The programs of README and examples, with nothing installed.
# Julia checks the hashes of Artifacts.toml, which no setting of the user's Git may change.
ls "$build"/packages/moec-*.tar.gz >/dev/null 2>&1 || scripts/packages.sh
mkdir "$outside/server" "$outside/bin" "$outside/user"
cp "$build"/packages/moec-*.tar.gz "$outside/server"
"$venv/bin/python" -u -m http.server 0 --bind 127.0.0.1 --directory "$outside/server" \
  >"$outside/server.txt" 2>&1 &
server=$!
trap 'kill $server; rm -rf "$outside"' EXIT
until port=$(grep -oE 'port [0-9]+' "$outside/server.txt"); do
  kill -0 $server && sleep 0.1
done
released=$outside/Moec.jl depot=$outside/released registry=$outside/released/registries/Local
cp -r bindings/julia "$released"
printf '[core]\n\tsymlinks = false\n\tautocrlf = true\n' >"$outside/odd.gitconfig"
GIT_CONFIG_GLOBAL=$outside/odd.gitconfig GIT_DEFAULT_HASH=sha256 \
  scripts/julia_artifacts.sh "http://127.0.0.1:${port#port }" >"$released/Artifacts.toml"
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null
git init -q "$released"
git -C "$released" add --all --force
git -C "$released" -c user.name=moec -c user.email=packages@moec.dev commit -q -m 0.1.0
uuid=$(sed -nE 's/^uuid = "(.*)"/\1/p' "$released/Project.toml")
mkdir -p "$registry/Moec"
cat >"$registry/Registry.toml" <<TOML
name = "Local"
uuid = "6a3b3c52-4d4e-4f1e-9f54-0c1d2f6f0a12"
repo = "file:///nowhere"

[packages]
$uuid = { name = "Moec", path = "Moec" }
TOML
printf 'name = "Moec"\nuuid = "%s"\nrepo = "%s"\n' "$uuid" "$released" \
  >"$registry/Moec/Package.toml"
printf '["0.1.0"]\ngit-tree-sha1 = "%s"\n' "$(git -C "$released" rev-parse 'HEAD^{tree}')" \
  >"$registry/Moec/Versions.toml"
{ echo "[0]"; sed -n '/^\[deps\]/,/^$/p' "$released/Project.toml" | sed 1d; } \
  >"$registry/Moec/Deps.toml"
printf '[0]\njulia = "1.5.0-1"\n' >"$registry/Moec/Compat.toml"
# Debian 11's julia downloads with this system's programs, which need this system's libraries.
for program in curl wget tar; do
  printf '#!/bin/sh\nexec env -u LD_LIBRARY_PATH -u LD_PRELOAD %s "$@"\n' \
    "$(command -v $program || echo false)" >"$outside/bin/$program"
done
chmod +x "$outside"/bin/*
export PATH=$outside/bin:$PATH no_proxy=127.0.0.1
released_julia() { env MOEC_LIBRARY= JULIA_DEPOT_PATH="$depot" scripts/julia.sh -O0 \
  --startup-file=no --project="$outside/user" "$@"; }
released_julia -e 'using Pkg; Pkg.add("Moec")'
! compgen -G "$depot/artifacts/*" >/dev/null || die "Pkg.add downloads what is lazy"
released_julia -e 'foreach(include, ARGS); using Libdl
println(only(filter(name -> occursin("libmoec.so", name), dllist())))' \
  "$outside"/{readme,train}.jl | grep -F "$depot/artifacts/" || die "the artifact is not opened"
JULIA_DEPOT_PATH=$depot scripts/wrong_library.sh scripts/julia.sh -O0 --startup-file=no \
  --project="$outside/user" -e 'using Moec'  # MOEC_LIBRARY comes first
rm -rf "$depot/artifacts"
truncate -s -1 "$outside"/server/*
! released_julia -e 'using Moec' >"$outside/refused.txt" 2>&1 || die "a wrong archive is accepted"
grep -q "Hash Mismatch" "$outside/refused.txt" || { cat "$outside/refused.txt" >&2; die "no word"; }
# The programs, four refusals and the release, too.
echo "$((passed + ${#programs[@]} + 5 + ${checks%% *})) passed, 0 failed"
