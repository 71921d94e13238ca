#!/usr/bin/env bash
# The official Node client into tests/contract/node/node_modules, where node and npm are at hand. `make test` calls this.
# Without it the tests of tests/contract/node are skipped, and say so.
set -euo pipefail
cd "$(dirname "$0")"
if ! command -v node > /dev/null || ! command -v npm > /dev/null; then
    echo "No node and npm: the tests of the Node client are skipped. On Debian: apt-get install nodejs npm" >&2
    exit 0
fi
if cmp -s package-lock.json node_modules/installed.json; then exit 0; fi
if npm ci --no-audit --no-fund --silent; then
    cp package-lock.json node_modules/installed.json
else
    echo "The Node client cannot be fetched: its tests are skipped." >&2
fi
