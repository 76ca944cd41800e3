#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the sdist and the wheel, checks both, and runs the installed wheel outside of the checkout:
#
#     bash tools/release.sh [OUTPUT] [EXTRA]     # dist and cu12 by default
#
# PYTHON names the interpreter (python3). Installs everything into a temporary folder; no GPU needed.
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:-dist} extra=${2:-cu12}
mkdir -p "$output"
output=$(cd "$output" && pwd)
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT

new_python() {  # a new environment; its interpreter
  "${PYTHON:-python3}" -m venv "$temporary/$1"
  printf '%s' "$temporary/$1/bin/python"
}

python=$(new_python build)
"$python" -m pip install --quiet hatchling twine
"$python" -m hatchling build --directory "$temporary/dist"
"$python" -m twine check --strict "$temporary"/dist/*

mkdir "$temporary/sdist"
tar -x -z -f "$temporary"/dist/*.tar.gz -C "$temporary/sdist" --strip-components 1
(cd "$temporary/sdist" && "$python" -m hatchling build --target wheel --directory "$temporary/again")
cmp "$temporary"/dist/*.whl "$temporary"/again/*.whl
echo "the sdist builds the same wheel"

wheel=$(echo "$temporary"/dist/*.whl)
python=$(new_python empty)
"$python" -m pip install --quiet "$wheel[$extra]"
cd "$temporary"
"$python" -m cumla info
"$python" -m cumla demo
cp "$temporary"/dist/* "$output"
du -b "$output"/cumla-*
