#!/usr/bin/env bash
# All that is to be measured on a GPU, in calls that each keep within ten minutes:
#   benchmarks/gpu_wheels.sh               beforehand, where there is a network: what a bare machine lacks
#   benchmarks/gpu.sh check                first, three minutes: is all well, and where does a step go
#   benchmarks/gpu.sh engine               second, arrays in: both shapes at 128, then the sweeps
#   benchmarks/gpu.sh http                 third, the whole server, and transformers in the same run
#   benchmarks/gpu.sh systems              with time left: replicas that share the GPU, transport, executors
#   benchmarks/gpu.sh --mps systems        also under an MPS daemon of its own, where the machine's rules allow it
#   benchmarks/gpu.sh --dry-run [PART...]  anywhere: every part on CPU, with a small shape (`make gpu-dry-run`)
# Each case writes its JSON when it ends. JSON, plots and the log come back as one archive in $OUT, or in
# benchmarks/results, which is written anew after each case; a case without a result is named, and ends the script
# with status 1. Random weights, a fixed number of tokens a chunk. .cache/gpu must travel too.
set -uo pipefail
cd "$(dirname "$0")/.."
results=${OUT:-benchmarks/results}
export PYTHONUNBUFFERED=1 TQDM_DISABLE=1 TRANSFORMERS_VERBOSITY=error

device=cuda turbo=large-v3-turbo large=large-v3 clips=128 tokens=100 rounds=3 limit_s=530 peer=bfloat16:64
threads=(4 8 16 1 2) workers=(1 2 4) sharing=(1 2 3) quick=() mps=false dry=false
slots=128 brief=() executors=(inline multiprocess ray) kernels=(torch triton)
ours=(arrays http) clip_lengths=(30 5 10) requests=512 formats=(wav,flac,mp3 wav flac mp3) at_once=(128 1 8 32 512)
while [[ ${1:-} == --* ]]; do
    case $1 in
    --mps) mps=true ;;
    --dry-run)
        dry=true device=cpu turbo=pocket large=pocket clips=4 tokens=20 rounds=1 peer=float32:4
        threads=(1) workers=(2) sharing=(2) quick=(--quick)
        slots=8 brief=(--budget-s 5) executors=(inline) kernels=(torch)
        ours=(arrays) clip_lengths=(5) requests=4 formats=(wav,flac,mp3) at_once=(128 1)
        ;;
    *) echo "unknown: $1" >&2 && exit 2 ;;
    esac
    shift
done
if (($# == 0)); then
    set -- check engine http systems
fi
archive=$results/gpu-$1.tar.gz
OUT=$(mktemp --directory) && export OUT
mkdir -p "$results"

pack() {
    tar --create --gzip --file "$archive.part" --directory "$OUT" --warning=no-file-changed .
    mv "$archive.part" "$archive"
}

prepare() {
    python3 -c 'import fastapi, msgspec, soundfile, soxr' 2>/dev/null && return
    local site=${TMPDIR:-/tmp}/asr-server-site
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$site" .cache/gpu/wheels/*.whl || exit
    export PYTHONPATH=$site:$PWD/.cache/gpu/site
}

# What a bare machine reads, draws and writes for the first time is not to count as the first case's.
warm_up() { # PART...
    local shapes=("$turbo")
    [[ " $* " == *" engine "* ]] && shapes+=("$large")
    timeout 150 python3 -m benchmarks.checkpoints --shape "${shapes[@]}" --device "$device"
    python3 -c 'import fastapi, onnxruntime, scipy, torch, transformers, triton, zmq; torch.zeros(1, device="cuda")'
    echo "== ready after $SECONDS s"
}

# FILE SECONDS COMMAND...: within what is left of the whole. The command finds its seconds in $budget_s, and its
# result is to be FILE.
timed() {
    local file=$1 seconds=$2 started=$SECONDS left=$((limit_s - SECONDS))
    shift 2
    echo "$file" >>"$OUT/expected.txt"
    export budget_s=$((seconds < left ? seconds : left))
    if ((budget_s < 20)); then
        echo "== $file: left out, no time"
        return
    fi
    echo "== $file, $budget_s s"
    timeout --kill-after=5 $((budget_s + 10)) "$@"
    echo "== $file ended with status $? after $((SECONDS - started)) s"
    pack
}

bench() { # NAME SECONDS MODULE FLAG...
    local name=$1 seconds=$2
    shift 2
    if $dry; then
        later "$name.json" "benchmarks.$1" --budget-s 600 "${@:2}" --json "$OUT/$name.json" "${quick[@]}"
        return
    fi
    timed "$name.json" "$seconds" bash -c 'python3 -m "benchmarks.$0" --budget-s "$budget_s" "$@"' "$@" \
        --json "$OUT/$name.json"
}

# In several processes: an error of the device spoils only what comes after it in the same one. Line by line: what
# is cut off has told how far it came.
tests() { # NAME SECONDS PROCESSES PATH...
    local name=$1 seconds=$2 processes=$3
    shift 3
    $dry || timed "$name.xml" "$seconds" python3 -m pytest -v -W default --numprocesses "$processes" \
        --dist worksteal --junit-xml "$OUT/$name.xml" "$@"
}

later() { # FILE MODULE FLAG...: a case of the dry run, in which most of the time would be imports
    echo "$1" >>"$OUT/expected.txt"
    printf '%q ' "${@:2}" >>"$OUT/cases.txt"
    echo >>"$OUT/cases.txt"
}

on_device() { # NAME SECONDS MODULE FLAG...
    bench "$@" --device "$device"
}

check() {
    local one=(--shape "$turbo" --in-flight 32 --tokens 40 --rounds 1 --slots "$((slots < 32 ? slots : 32))")
    tests cuda-tests 120 4 tests/engine/test_cuda.py
    on_device parity 90 parity --shape "$turbo"
    on_device graphs-off 40 engine "${one[@]}" --no-cuda-graphs
    on_device profile 60 engine "${one[@]}" --profile
    tests kernel-tests 90 8 tests/model/kernels tests/model/test_float8.py
}

engine() {
    local common=(--rounds "$rounds" --slots "$slots")
    on_device turbo 70 engine "${common[@]}" --shape "$turbo" --in-flight 128 1 --tokens 100
    on_device large 110 engine "${common[@]}" --shape "$large" --in-flight 128 1 --tokens 100
    # What each kernel takes by itself, the trial at load tells: it is part of every result.
    on_device kernels 70 engine "${common[@]}" --shape "$turbo" --in-flight 128 1 --tokens 100 \
        --kernels "${kernels[@]}"
    on_device fp8 70 engine "${common[@]}" --shape "$large" --in-flight 128 --tokens 100 --fp8
    on_device workers 130 engine "${common[@]}" --shape "$turbo" --in-flight 128 8 32 --tokens 100 \
        --compute-workers "${workers[@]}" --copy-overlap off on --plot "$OUT/workers.png"
    on_device lengths 120 engine "${common[@]}" --shape "$turbo" --one-at-a-time \
        --in-flight 128 8 32 512 --tokens 100 60 150 --clip-s 30 5 10 --plot "$OUT/lengths.png"
}

http() {
    local common=(--shape "$turbo" --tokens "$tokens" --repeats "$rounds")
    on_device http-long 230 serving "${common[@]}" --length long --formats wav,flac,mp3 --concurrency 128 1 \
        --preprocess-workers "${threads[@]}" --plot "$OUT/http-long.png"
    on_device http-clips 170 serving "${common[@]}" --length "${clip_lengths[@]}" --formats "${formats[@]}" \
        --concurrency "${at_once[@]}" --requests "$requests" --one-at-a-time --plot "$OUT/http-clips.png"
    on_device peers 120 peers --tokens "$tokens" --clips "$clips" --rounds "$rounds" --shape "$turbo" \
        --ours "${ours[@]}" --peers "transformers:$peer" --plot "$OUT/peers.png"
}

systems() {
    local count
    for count in "${sharing[@]}"; do
        replicas "replicas-$count" "$count"
    done
    if $mps; then
        export CUDA_MPS_PIPE_DIRECTORY=$OUT/mps CUDA_MPS_LOG_DIRECTORY=$OUT/mps-log
        mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
        if nvidia-cuda-mps-control -d; then
            for count in "${sharing[@]}"; do
                replicas "replicas-$count-mps" "$count"
            done
            echo quit | nvidia-cuda-mps-control
        fi
        rm -rf "$CUDA_MPS_PIPE_DIRECTORY"
        unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    fi
    bench transport 60 transport "${brief[@]}"
    bench executors 60 executors --executors "${executors[@]}" "${brief[@]}"
}

replicas() { # NAME COUNT: so many on the GPU, short clips
    on_device "$1" 70 serving --shape "$turbo" --tokens "$tokens" --repeats "$rounds" --length 5 --formats wav \
        --concurrency 128 --requests "$requests" --serve "--replicas $2"
}

main() {
    prepare
    $dry || warm_up "$@"
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null
    for part in "$@"; do
        "$part"
    done
    if $dry; then
        python3 -m benchmarks.dry_run "$OUT/cases.txt" 0 &
        python3 -m benchmarks.dry_run "$OUT/cases.txt" 1
        wait
        rm -f "$OUT"/claimed-*
    fi
    python3 -m benchmarks.gpu_summary "$OUT"
}

main "$@" 2>&1 | tee "$OUT/log.txt"
pack
missing=$(sed 's|^|./|' "$OUT/expected.txt" | sort | comm -23 - <(tar --list --file "$archive" | sort))
failed=$(grep '^== failed' "$OUT/log.txt")
rm -rf "$OUT"
if [[ -n $failed ]]; then
    echo "$failed"
    exit 1
fi
if [[ -n $missing ]]; then
    printf 'no result of:\n%s\n' "$missing"
    exit 1
fi
echo "all results are in $archive"
