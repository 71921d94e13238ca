#!/usr/bin/env bash
# Browsers for the tests of the page, where Debian's package manager and the right to use it are at hand: Chromium,
# and Firefox with a silent sound device. Without a browser its tests are skipped, and say so.
set -euo pipefail
has() { for name in "$@"; do if command -v "$name" > /dev/null; then return 0; fi; done; return 1; }
missing=()
has chromium chromium-browser google-chrome || missing+=(chromium)
has firefox-esr firefox || missing+=(firefox-esr)
has pulseaudio || missing+=(pulseaudio)
if [ ${#missing[@]} = 0 ]; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null && exit 0
fi
echo "Tests of the page are skipped for want of a browser. On Debian: apt-get install ${missing[*]}" >&2
