#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# test_python.sh: build the wheels that are shipped, install them into a clean environment and run
# the tests there, outside the source tree.
. "$(dirname "$0")/lib.sh"
clean=$build/py-test-venv

scripts/wheel.sh
wheel=$(echo "$build"/wheel/moec-*.whl) golden=$(echo "$build"/wheel/moec_golden-*.whl)

# The environment is kept while its pins are the same; the wheel is new each time.
pins=scripts/requirements.txt tests=scripts/requirements_test.txt
pip=("$venv/bin/python" -m pip --python "$clean/bin/python" --disable-pip-version-check)
stamp=$(cat "$pins" "$tests" <("$venv/bin/python" --version) | sha256sum)
if [ "$(cat "$clean/.stamp" 2>/dev/null)" != "$stamp" ]; then
  rm -rf "$clean"
  "$venv/bin/python" -m venv --without-pip "$clean"
  retry "what the Python package needs" "${pip[@]}" install --constraint "$pins" \
    --constraint "$tests" "$wheel[test]"
  echo "$stamp" >"$clean/.stamp"
fi
"${pip[@]}" install --quiet --no-deps --no-index --force-reinstall "$wheel" "$golden"

outside=$(mktemp -d)
trap 'rm -rf "$outside"' EXIT
cd "$outside"
"$clean/bin/python" - "$wheel" <<'PYTHON'
import sys, zipfile
import moec
names = zipfile.ZipFile(sys.argv[1]).namelist()
libraries = sorted(name for name in names if ".so" in name)
assert "site-packages" in moec.__file__, moec.__file__
assert sys.argv[1].endswith(".whl") and "-cp311-abi3-" in sys.argv[1], sys.argv[1]
expected = {"moec/_core.abi3.so", "moec/lib/libmoec.so.0", "moec/lib/libmoec_cuda.so.0",
            "moec/lib/libmoec_jax.so"}
assert set(libraries) == expected, libraries
assert len(libraries) == len(set(libraries))
assert not {"torch", "transformers", "jax"} & sys.modules.keys()
assert not any(name.startswith("tests/") for name in names)
PYTHON

# One wheel serves every CPython: the smoke test runs on each that is here, in a folder of packages.
try_on() { # try_on PYTHON
  local python=$1 version packages
  version=$("$python" -c 'import sys; assert sys.implementation.name == "cpython"
assert sys.version_info >= (3, 11); print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || return 0
  case " $seen " in *" $version "*) return 0 ;; esac
  seen="$seen $version"
  packages=$build/py-packages/$version
  if [ "$(cat "$packages/.stamp" 2>/dev/null)" != "$stamp" ]; then
    rm -rf "$packages"
    # pip would compile for its own version.
    retry "packages for CPython $version" "${pip[@]}" install --quiet --no-compile \
      --target "$packages" --python-version "$version" --only-binary :all: \
      --constraint "$root/$pins" numpy ml_dtypes typer rich
    echo "$stamp" >"$packages/.stamp"
  fi
  "${pip[@]}" install --quiet --no-compile --no-deps --no-index --target "$outside/$version" \
    --python-version "$version" --only-binary :all: "$wheel" "$golden"
  PYTHONPATH=$outside/$version:$packages "$python" -m moec check \
    --family qwen3_moe --family gpt_oss
  echo "the same wheel on CPython $version"
}
seen=
for python in $(type -ap python3.11 python3.12 python3.13 python3.14 python3.15) \
  "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python3; do
  try_on "$python"
done
"$clean/bin/python" -m pytest -p no:cacheprovider "$root/bindings/python/tests"
