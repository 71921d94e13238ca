#!/usr/bin/env bash
# What benchmarks/gpu.sh needs on a bare machine with torch and transformers but without a network: wheels for
# its Python, what openai-whisper carries, and real weights with recordings, in .cache/gpu. With the working tree
# they must stay below 64 MiB.
#   benchmarks/gpu_wheels.sh [PYTHON_VERSION [FOLDER]]
set -euo pipefail
cd "$(dirname "$0")/.."
python_version=${1:-3.12}
target=${2:-.cache/gpu}
python=${PYTHON:-.venv/bin/python} # has openai-whisper
rm -rf "$target"
mkdir -p "$target/wheels" "$target/site/whisper"

packages=(
    fastapi fastapi-offline websockets opentelemetry-api starlette annotated-doc pydantic pydantic-core annotated-types typing-inspection typing-extensions
    uvicorn h11 httptools click python-multipart anyio idna
    soundfile soxr cffi pycparser
    msgspec pyzmq rapidfuzz more-itertools setproctitle pytest-asyncio pytest-timeout
)
platforms=()
for version in _2_28 _2_27 _2_26 _2_24 _2_17 2014 _2_12 _2_5 1; do
    platforms+=(--platform "manylinux${version}_x86_64")
done
"$python" -m pip download --quiet --no-deps --only-binary=:all: --constraint constraints.txt \
    --python-version "$python_version" --implementation cp "${platforms[@]}" \
    --dest "$target/wheels" "${packages[@]}"

# Not the whole of openai-whisper, which needs more packages: all we read is its vocabulary, alignment heads and
# rules of spelling.
source=$("$python" -c 'from importlib.util import find_spec; print(find_spec("whisper").submodule_search_locations[0])')
sed -n '/^_ALIGNMENT_HEADS = {/,/^}/p' "$source/__init__.py" >"$target/site/whisper/__init__.py"
cp "$source/tokenizer.py" "$target/site/whisper/"
mkdir "$target/site/whisper/assets"
cp "$source/assets/multilingual.tiktoken" "$target/site/whisper/assets/"
cp -r "$source/normalizers" "$target/site/whisper/"
rm -rf "$target/site/whisper/normalizers/__pycache__"
[[ -n ${NO_REAL_WEIGHTS:-} ]] || "$python" -m benchmarks.real_parity "$target/real.tar.gz"

tree_mib=$(git ls-files -z --cached --others --exclude-standard | du -c --files0-from=- -m | tail -n 1 | cut -f 1)
target_mib=$(du -sm "$target" | cut -f 1)
echo "$target_mib MiB in $target, $tree_mib MiB in the working tree"
if ((target_mib + tree_mib > 63)); then
    echo "more than the 63 MiB that can travel: NO_REAL_WEIGHTS=1 leaves the real weights out" >&2
    exit 1
fi
