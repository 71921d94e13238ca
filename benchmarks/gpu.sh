#!/usr/bin/env bash
# All that is to be measured on a GPU, in parts that each keep to their time:
#   benchmarks/gpu_wheels.sh                 beforehand, where there is a network: what a bare machine lacks
#   benchmarks/gpu.sh check                  on the GPU machine, three minutes: is all well, and where does a step go
#   benchmarks/gpu.sh engine                 arrays in, nine minutes: both shapes at 128, then the sweeps
#   benchmarks/gpu.sh http peers             the whole server and transformers, nine minutes
#   benchmarks/gpu.sh --dry-run [PART...]    anywhere: every part on CPU, with small shapes
# Each case writes its JSON when it ends. JSON, plots and the log come back as one archive in $OUT, or in
# benchmarks/results. Random weights, a fixed number of tokens a chunk. .cache/gpu must travel too.
set -uo pipefail
cd "$(dirname "$0")/.."
results=${OUT:-benchmarks/results}
export OUT=${TMPDIR:-/tmp}/asr-server-gpu-results PYTHONUNBUFFERED=1 TQDM_DISABLE=1 TRANSFORMERS_VERBOSITY=error
mkdir -p "$OUT" "$results"

device=cuda turbo=large-v3-turbo large=large-v3 clips=128 tokens=100 rounds=3 limit_s=530 quick=()
if [[ ${1:-} == --dry-run ]]; then
    shift
    device=cpu turbo=tiny large=base clips=4 tokens=20 rounds=1 limit_s=3600 quick=(--quick)
fi

prepare() {
    python3 -c 'import fastapi, msgspec, soundfile, soxr' 2>/dev/null && return
    local site=${TMPDIR:-/tmp}/asr-server-site
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$site" .cache/gpu/wheels/*.whl || exit
    export PYTHONPATH=$site:$PWD/.cache/gpu/site
}

# NAME SECONDS COMMAND...: within what is left of the whole. The command finds its seconds in $budget_s.
timed() {
    local name=$1 seconds=$2 started=$SECONDS left=$((limit_s - SECONDS))
    shift 2
    export budget_s=$((seconds < left ? seconds : left))
    if ((budget_s < 20)); then
        echo "== $name: left out, no time"
        return
    fi
    echo "== $name, $budget_s s"
    timeout --kill-after=5 $((budget_s + 10)) "$@"
    echo "== $name ended with status $? after $((SECONDS - started)) s"
}

bench() {  # NAME SECONDS MODULE FLAG...
    local name=$1 seconds=$2
    shift 2
    timed "$name" "$seconds" bash -c 'python3 -m "benchmarks.$0" --budget-s "$budget_s" "$@"' "$@" \
        --device "$device" --json "$OUT/$name.json" "${quick[@]}"
}

check() {
    timed cuda-tests 70 python3 -m pytest -q -W default tests/engine/test_cuda.py
    bench parity 60 parity --shape "$turbo"
    bench graphs-off 30 engine --shape "$turbo" --in-flight 32 --tokens 40 --rounds 1 --slots 32 --no-cuda-graphs
    bench profile 60 engine --shape "$turbo" --in-flight 32 --tokens 40 --rounds 1 --slots 32 --profile
}

engine() {
    local common=(--rounds "$rounds" --slots 128)
    bench turbo 90 engine "${common[@]}" --shape "$turbo" --in-flight 128 1 --tokens 100
    bench large 100 engine "${common[@]}" --shape "$large" --in-flight 128 1 --tokens 100
    bench sweep 320 engine "${common[@]}" --shape "$turbo" --one-at-a-time \
        --in-flight 128 8 32 512 --tokens 100 60 150 --clip-s 30 5 10 \
        --compute-workers 1 2 3 4 --copy-overlap off on --plot "$OUT/engine.png"
}

http() {
    local common=(--shape "$turbo" --tokens "$tokens" --repeats "$rounds")
    bench http-long 170 serving "${common[@]}" --length long --formats wav,flac,mp3 --concurrency 6 \
        --preprocess-workers 4 8 16 --plot "$OUT/http-long.png"
    bench http-clips 170 serving "${common[@]}" --length 30 5 10 --formats wav,flac,mp3 wav flac mp3 \
        --concurrency 128 1 8 32 512 --requests 512 --one-at-a-time --plot "$OUT/http-clips.png"
}

peers() {
    local common=(--tokens "$tokens" --clips "$clips" --rounds "$rounds")
    bench peers 120 peers "${common[@]}" --shape "$turbo" --peers transformers:bfloat16:64 --plot "$OUT/peers.png"
}

main() {
    prepare
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null
    for part in "$@"; do
        "$part"
    done
    python3 -m benchmarks.gpu_summary "$OUT"
}

if (($# == 0)); then
    set -- check engine http peers
fi
main "$@" 2>&1 | tee "$OUT/log.txt"
tar --create --gzip --file "$results/gpu-$1.tar.gz" --directory "$OUT" .
