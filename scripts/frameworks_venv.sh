#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# frameworks_venv.sh: the environments of the framework tests: build/frameworks, and the oldest
# supported transformers in build/frameworks-older. Kept while their pins are the same.
. "$(dirname "$0")/lib.sh"
pins=$root/scripts/requirements_frameworks.txt
place=$build/frameworks older=$build/frameworks-older
oldest=(transformers==5.17.0 huggingface_hub==1.33.0 httpx==0.28.1 httpcore==1.0.9)
stamp=$(cat "$pins" <("$venv/bin/python" --version) <(echo "${oldest[@]}") | sha256sum)
[ "$(cat "$place/.stamp" 2>/dev/null)" = "$stamp" ] && exit 0
rm -rf "$place" "$older"
"$venv/bin/python" -m venv "$place"
pip=("$place/bin/python" -m pip install --disable-pip-version-check --no-deps)
# pip keeps all downloads of a call until its end, so the large packages come one at a time.
large='^(torch|jaxlib|nvidia-[a-z0-9-]+)=='
for package in $(grep -E "$large" "$pins"); do
  retry "$package" "${pip[@]}" --no-cache-dir "$package"
done
retry "PyTorch, transformers and JAX" "${pip[@]}" --requirement "$pins"
retry "the oldest transformers" "${pip[@]}" --target "$older" "${oldest[@]}"
echo "$stamp" >"$place/.stamp"
