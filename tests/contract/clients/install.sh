#!/usr/bin/env bash
# Virtual environments for the clients of other projects, each with its own in .cache/clients, because what they
# depend on does not go together. tests/contract/clients/NAME.txt says what each needs, and NAME.sdist.txt names the source
# distribution whose tests are run. `make trial` calls this. The tests of a client that cannot be installed are
# skipped, and say so.
#   tests/contract/clients/install.sh            all of them
#   tests/contract/clients/install.sh litellm    one
set -euo pipefail
cd "$(dirname "$0")/../../.."
names=("$@")
if [ $# = 0 ]; then names=(litellm langchain pipecat livekit agents speechrecognition vercel openai openai-new openai-old); fi
install_vercel() {
    cd tests/contract/clients/vercel
    if cmp -s package-lock.json node_modules/installed.json; then return; fi
    if command -v npm > /dev/null && npm ci --no-audit --no-fund --silent; then
        cp package-lock.json node_modules/installed.json
    else
        echo "Vercel's AI SDK cannot be installed: its tests are skipped." >&2
    fi
}
for name in "${names[@]}"; do
    if [ "$name" = vercel ]; then (install_vercel); continue; fi
    requirements=tests/contract/clients/$name.txt sources=tests/contract/clients/$name.sdist.txt environment=.cache/clients/$name
    if cmp -s "$requirements" "$environment/installed.txt"; then continue; fi
    "${PYTHON:-python3}" -m venv "$environment"
    if "$environment/bin/pip" install --quiet --prefer-binary --requirement "$requirements" \
        && { [ ! -f "$sources" ] || "$environment/bin/pip" download --quiet --no-deps --no-binary "$name" \
            --require-hashes --requirement "$sources" --dest "$environment"; }; then
        cp "$requirements" "$environment/installed.txt"
    else
        echo "$name cannot be installed: its tests are skipped." >&2
    fi
done
