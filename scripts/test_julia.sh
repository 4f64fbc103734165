#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_julia.sh: Moec.jl developed into a new environment of a new depot whose only registry is
# empty (nothing but the standard library can be found) and tested there by Pkg.test; the programs
# of examples/julia, of the README and of docs/; and the static check, which knows every function.
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
export JULIA_DEPOT_PATH=$outside/depot MOEC_LIBRARY=$prefix/lib/libmoec.so.0
timeout 600 scripts/julia.sh -O0 --startup-file=no "$outside/run.jl" "${programs[@]}" \
  2>&1 | tee "$log"
echo "executed with $where"
scripts/wrong_library.sh scripts/julia.sh -O0 --startup-file=no --project="$outside/environment" \
  -e 'using Moec'
passed=$(sed -nE 's/^Moec +\| +([0-9]+) +.*/\1/p' "$log")
[ "$(grep -c ' ran$' "$log")" = ${#programs[@]} ] || die "a program did not run"
[ "${passed:-0}" -gt 500 ] || die "Pkg.test ran ${passed:-no} tests"
# The programs and the refusal, too.
echo "$((passed + ${#programs[@]} + 1 + ${checks%% *})) passed, 0 failed"
