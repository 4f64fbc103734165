#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# frameworks_venv.sh: the environments of the framework tests: build/frameworks, the oldest
# supported transformers and PEFT in build/frameworks-older, and TRL in build/frameworks-trl. Each
# is kept while its pins are the same.
. "$(dirname "$0")/lib.sh"
pins=$root/scripts/requirements_frameworks.txt
place=$build/frameworks older=$build/frameworks-older trl=$build/frameworks-trl
oldest=(transformers==5.17.0 huggingface_hub==1.33.0 httpx==0.28.1 httpcore==1.0.9 peft==0.19.1)
with_trl=(trl==1.16.0 datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1 python-dateutil==4.0.0
  xxhash==4.1.0 dill==0.4.1 multiprocess==0.70.19)
pip=("$place/bin/python" -m pip install --disable-pip-version-check --no-deps)
stamp=$(cat "$pins" <("$venv/bin/python" --version) | sha256sum)
if [ "$(cat "$place/.stamp" 2>/dev/null)" != "$stamp" ]; then
  rm -rf "$place"
  "$venv/bin/python" -m venv "$place"
  # pip keeps all downloads of a call until its end, so the large packages come one at a time.
  large='^(torch|jaxlib|nvidia-[a-z0-9-]+)=='
  for package in $(grep -E "$large" "$pins"); do
    retry "$package" "${pip[@]}" --no-cache-dir "$package"
  done
  retry "PyTorch, transformers and JAX" "${pip[@]}" --requirement "$pins"
  echo "$stamp" >"$place/.stamp"
fi
stamp=$(echo "$("$venv/bin/python" --version) ${oldest[*]}")
if [ "$(cat "$older/.stamp" 2>/dev/null)" != "$stamp" ]; then
  rm -rf "$older"
  retry "the oldest transformers and PEFT" "${pip[@]}" --target "$older" "${oldest[@]}"
  echo "$stamp" >"$older/.stamp"
fi
stamp=$(echo "$("$venv/bin/python" --version) ${with_trl[*]}")
if [ "$(cat "$trl/.stamp" 2>/dev/null)" != "$stamp" ]; then
  rm -rf "$trl"
  # dill pickles modules by value whose folder has another name
  retry "TRL" "${pip[@]}" --target "$trl/site-packages" "${with_trl[@]}"
  echo "$stamp" >"$trl/.stamp"
fi
