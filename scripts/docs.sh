#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# docs.sh: the documentation into build/docs/html: moec.h through Doxygen, pages of docs/ through
# Sphinx, in an environment of its own (build/docs-venv). A warning is an error, and so is a link
# to a place that these pages lack. External links are listed in build/docs/links.txt, and tried
# where there is a network; one that fails there is said, and no error. Needs no library.
. "$(dirname "$0")/lib.sh"
scripts/bootstrap.sh docs
place=$build/docs-venv out=$build/docs pins=scripts/requirements_docs.txt
stamp=$(cat "$pins" <("$venv/bin/python" --version) | sha256sum)
if [ "$(cat "$place/.stamp" 2>/dev/null)" != "$stamp" ]; then
  rm -rf "$place"
  "$venv/bin/python" -m venv "$place"
  retry "what the documentation needs" "$place/bin/python" -m pip install \
    --disable-pip-version-check --no-deps --requirement "$pins"
  echo "$stamp" >"$place/.stamp"
fi

rm -rf "$out"
mkdir -p "$out"
cat docs/Doxyfile - <<EOF | doxygen - >"$out/doxygen.txt" 2>&1
OUTPUT_DIRECTORY = $out
EOF
[ ! -s "$out/doxygen.txt" ] || { cat "$out/doxygen.txt" >&2; die "Doxygen warns"; }
export MOEC_DOXYGEN_XML=$out/xml
"$place/bin/python" -m sphinx -W --keep-going --quiet -d "$out/trees" -b html docs \
  "$out/html"
# Sphinx takes a directive whose first line has a backquote for text, without a warning.
! grep -rlF --include='*.html' -e '{part}' -e '{made}' "$out/html" ||
  die "the pages above show a directive instead of what it stands for"
"$place/bin/python" docs/_ext/links.py "$out/html" "$out/links.txt"
pages=$(find "$out/html" -name '*.html' | wc -l)
echo "build/docs/html/index.html; $pages passed, 0 failed (pages)"
