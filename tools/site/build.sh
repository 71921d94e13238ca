#!/usr/bin/env bash
# Write the documentation as web pages: tools/site/build.sh BIN_OF_MKDOCS FOLDER
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=$1 folder=$2 pages=.cache/site/pages
rm -rf "$pages"
mkdir -p "$pages"
# What pages link to, files of code among it, at the same places.
git ls-files -z '*.md' docs examples deploy LICENSE ':!.github' ':!*/templates/*' | xargs -0 cp --parents --target-directory "$pages"
NO_MKDOCS_2_WARNING=1 "$bin/mkdocs" build --config-file tools/site/mkdocs.yml --site-dir "$PWD/$folder"
