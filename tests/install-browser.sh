#!/usr/bin/env bash
# Browsers for the tests of the page, where Debian's package manager and the right to use it are at hand: Chromium,
# best its shell without windows, and Firefox with a silent sound device. Without a browser its tests are skipped, and
# say so.
set -euo pipefail
has() { for name in "$@"; do if command -v "$name" > /dev/null; then return 0; fi; done; return 1; }
install() { [ "$(id -u)" = 0 ] && has apt-get && apt-get install -y -qq --no-install-recommends "$@" > /dev/null; }
missing=()
has chromium-headless-shell chromium chromium-browser google-chrome || missing+=(chromium)
has firefox-esr firefox || missing+=(firefox-esr)
has pulseaudio || missing+=(pulseaudio)
if [ ${#missing[@]} != 0 ]; then
    { [ "$(id -u)" = 0 ] && has apt-get && apt-get update -qq && install "${missing[@]}"; } || {
        echo "Tests of the page are skipped for want of a browser. On Debian: apt-get install ${missing[*]}" >&2
        exit 0
    }
fi
if ! has chromium-headless-shell; then install chromium-headless-shell 2> /dev/null || true; fi
