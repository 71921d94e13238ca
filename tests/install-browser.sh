#!/usr/bin/env bash
# Chromium for the tests of the page, where Debian's package manager and the right to use it are at hand.
# Without a browser those tests are skipped, and say so.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" > /dev/null; then exit 0; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium > /dev/null && exit 0
fi
echo "No browser: the tests of the page are skipped. On Debian: apt-get install chromium" >&2
