#!/bin/sh
# Installs the speech synthesisers that tools/train_digits.py uses, on Debian or Ubuntu.
# SVOX Pico (libttspico-utils, Apache-2.0) lies in Debian's non-free section because its voices
# come without sources; where that section is not enabled, its packages are fetched by hand.
set -eu
apt-get update
apt-get install -y --no-install-recommends espeak-ng libespeak-ng1 flite festival curl \
    festvox-kallpc16k festvox-kdlpc16k festvox-us-slt-hts \
    festvox-italp16k festvox-itapc16k festvox-ca-ona-hts festvox-ru \
    festvox-czech-dita festvox-czech-krb festvox-czech-machac festvox-czech-ph \
    festvox-suopuhe-lj festvox-suopuhe-mv
if ! apt-get install -y libttspico-utils; then
    folder=$(mktemp -d)
    base=http://deb.debian.org/debian/pool/non-free/s/svox
    version=1.0+git20130326-13
    machine=$(dpkg --print-architecture)
    for file in "libttspico-data_${version}_all.deb" "libttspico0_${version}_${machine}.deb" \
        "libttspico-utils_${version}_${machine}.deb"; do
        curl -fsS -o "$folder/$file" "$base/$file"
    done
    apt-get install -y "$folder"/*.deb
fi
