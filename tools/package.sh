#!/bin/bash
# Build nbddp's wheel and sdist, and check their contents: bash tools/package.sh [folder for both]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
built=${1:-$scratch/dist}
here="$scratch/venv/bin"

python3 -m venv "$scratch/venv"
"$here/pip" install -qq --disable-pip-version-check hatchling packaging
"$here/python" -m hatchling build -d "$built" >"$scratch/log" 2>&1 || { cat "$scratch/log"; exit 1; }

mkdir "$scratch/unpacked"
tar -xzf "$built"/nbddp-*.tar.gz --strip-components 1 -C "$scratch/unpacked"
(cd "$scratch/unpacked" && "$here/python" -m hatchling build -t wheel -d "$scratch/again") \
    >"$scratch/log" 2>&1 || { cat "$scratch/log"; exit 1; }
cmp "$built"/nbddp-*.whl "$scratch"/again/nbddp-*.whl # a wheel built from the sdist is the same

"$here/python" tools/package_contents.py "$built"/nbddp-*.whl "$built"/nbddp-*.tar.gz
echo "the wheel and the sdist hold what they should: $(cd "$built" && du -h nbddp-* | tr '\n\t' '; ')"
