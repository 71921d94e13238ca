#!/bin/sh
# Installs what tools/train_digits.py hears, on Debian or Ubuntu: speech synthesisers, and what people recorded:
# prompts of Asterisk, a speaking clock, names of things.
set -eu
apt-get update
apt-get install -y --no-install-recommends espeak-ng libespeak-ng1 flite festival \
    festvox-kallpc16k festvox-kdlpc16k festvox-us-slt-hts \
    festvox-italp16k festvox-itapc16k festvox-ca-ona-hts festvox-ru \
    festvox-czech-dita festvox-czech-krb festvox-czech-machac festvox-czech-ph \
    festvox-suopuhe-lj festvox-suopuhe-mv \
    asterisk-core-sounds-en-wav asterisk-core-sounds-es-wav asterisk-core-sounds-fr-wav \
    asterisk-core-sounds-it-wav asterisk-core-sounds-ru-wav \
    saytime ktuberling-data
apt-get install -y libttspico-utils ||
    echo "Going on without SVOX Pico: it is in Debian's section non-free, which is not enabled here."
