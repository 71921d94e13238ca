#!/usr/bin/env bash
# Write what an installed wheel brings as CycloneDX: tools/sbom.sh BIN_OF_THE_TOOLS FILE
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$1 file=$2 environment=.cache/sbom
"${PYTHON:-python3}" -m venv --clear --without-pip $environment
"$tools/pip" --python $environment/bin/python install --quiet --disable-pip-version-check --constraint constraints.txt .
mkdir -p "$(dirname "$file")"
"$tools/cyclonedx-py" environment --pyproject pyproject.toml --output-reproducible --output-file "$file" $environment/bin/python
