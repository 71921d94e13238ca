#!/usr/bin/env bash
# All that is to be measured on a GPU, in four calls (of ten minutes that a call may take):
#   benchmarks/gpu_wheels.sh               beforehand, where there is a network: what a bare machine lacks
#   benchmarks/gpu.sh first                390 s: is all well, with real weights too; then every figure of the headline:
#                                          arrays in, greedy and as served; the whole server on clips and on long files
#   benchmarks/gpu.sh second               300 s: large-v3, workers x copy overlap x batch, no graphs
#   benchmarks/gpu.sh sweeps               400 s: threads, loads, kernels, encode batches, lengths, word times
#   benchmarks/gpu.sh systems              300 s: replicas that share the GPU, API process
#   benchmarks/gpu.sh --limit-s 200 PART   begins nothing that would not end by then
#   benchmarks/gpu.sh --mps systems        also under an MPS daemon of its own, where the machine's rules allow it
#   benchmarks/gpu.sh --dry-run [PART...]  anywhere: every part on CPU, with a small shape (`make gpu-dry-run`)
# Each case writes its JSON when it ends. JSON and the log come back as one archive in $OUT, or in
# benchmarks/results, which is written anew after each case; the log lies beside it until the end, for a call that
# is cut off. A case that fails, or has no result, is named, and ends the script with status 1. One that hangs is
# aborted, and says where each of its threads stood. Random weights, a fixed number of tokens a chunk. .cache/gpu must
# travel too. A machine that is still there finds what an earlier call installed, compiled and drew.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
results=${OUT:-benchmarks/results}
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 TQDM_DISABLE=1 TRANSFORMERS_VERBOSITY=error
ulimit -c 0 # an aborted process is not to write its memory to the disk

device=cuda turbo=large-v3-turbo large=large-v3 tokens=100 rounds=3
real=.cache/gpu/real.tar.gz uploads=${TMPDIR:-/tmp}/asr-server-uploads start_limit_s=120
declare -A limits_s=([first]=390 [second]=300 [sweeps]=400 [systems]=300) # of a call, from its first second to its last
threads=(4) more_threads=(1 2 4 8 16) workers=(1 2 4) sharing=(1 2 3) quick=() mps=false dry=false most_s=560
slots=128 steady=512 batches=(1 32 64 128 256) encode_batches=(8 11 16)
kernels=(auto torch) long_formats=wav,flac,wav,flac,wav,mp3 clip_lengths=(5 30) requests=512 at_once=(8 32 512)
num_long=128 # files: about 40 hours
while [[ ${1:-} == --* ]]; do
    case $1 in
    --mps) mps=true ;;
    --limit-s) most_s=$2 && shift ;;
    --dry-run)
        dry=true device=cpu turbo=pocket large=pocket tokens=20 rounds=1
        threads=(1) more_threads=(2) workers=(2) sharing=(2) quick=(--quick) start_limit_s=300
        slots=8 steady=8 batches=(2) encode_batches=(2)
        kernels=(torch) clip_lengths=(5) requests=4 at_once=(2) num_long=2 uploads=.cache/gpu-dry-run/uploads
        ;;
    *) echo "unknown: $1" >&2 && exit 2 ;;
    esac
    shift
done
if (($# == 0)); then
    set -- first second sweeps systems
fi
limit_s=0
for part in "$@"; do
    limit_s=$((limit_s + ${limits_s[$part]:?there is no such part}))
done
limit_s=$((limit_s < most_s ? limit_s : most_s))
if $dry; then
    limit_s=86400
fi
archive=$results/gpu-$1.tar.gz
OUT=$(mktemp --directory) && export OUT
mkdir -p "$results"

pack() {
    local part=$archive.part$BASHPID # cases may end side by side
    tar --create --gzip --file "$part" --directory "$OUT" --warning=no-file-changed .
    mv "$part" "$archive"
}

prepare() {
    python3 -c 'import fastapi, msgspec, soundfile, soxr' 2>/dev/null && return
    local site=${TMPDIR:-/tmp}/asr-server-site
    if [[ ! -e $site/complete ]]; then
        python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
            --target "$site" .cache/gpu/wheels/*.whl || return
        touch "$site/complete"
    fi
    export PYTHONPATH=$site:$PWD/.cache/gpu/site
}

told=name,memory.total,memory.used,driver_version,clocks.max.sm,power.limit,compute_mode
device_look='import fastapi, onnxruntime, scipy, transformers, zmq, torch  # which every case reads again
torch.zeros(1, device="cuda")
print(torch.__version__, torch.version.cuda, torch.backends.cudnn.version(), torch.cuda.get_device_properties(0))'

# What a bare machine reads, draws and writes for the first time is not to count as the first case's. The uploads are
# made at low priority beside what is not timed: `uploads_ready` waits for them.
warm_up() { # PART...
    local shapes=("$turbo") looking
    [[ " $* " == *" second "* ]] && shapes+=("$large")
    make_uploads &
    making=$!
    timeout 60 bash -c 'command -v gcc clang; nvidia-smi --query-gpu=$0 --format=csv; python3 -c "$1"' "$told" "$device_look" &
    looking=$!
    timeout 90 python3 -m harness.checkpoints --shape "${shapes[@]}" --device "$device"
    wait "$looking"
    echo "== ready after $SECONDS s"
}

make_uploads() {
    nice -n 10 timeout 200 python3 -m benchmarks.uploads "$uploads" --length "${clip_lengths[@]}" --formats wav \
        --count "$requests"
    nice -n 10 timeout 200 python3 -m benchmarks.uploads "$uploads" --length long --formats "$long_formats" \
        --count "$num_long"
}

uploads_ready() {
    [[ -z ${making:-} ]] || wait "$making"
    echo "== uploads ready after $SECONDS s"
}

grace_s=10 # in which a case that begins nothing more ends what it has begun
ending_s=20 # for the last case's grace, its end by force, the summary and the archive

# FILE SECONDS COMMAND...: within what is left of the whole. The command finds its seconds in $budget_s, and its
# result is to be FILE.
timed() {
    local file=$1 seconds=$2 started=$SECONDS left=$((limit_s - ending_s - SECONDS)) status
    shift 2
    echo "$file" >>"$OUT/expected.txt"
    export budget_s=$((seconds < left ? seconds : left))
    if ((budget_s < 20)); then
        echo "== $file: left out, no time"
        return
    fi
    echo "== $file, $budget_s s"
    timeout --signal=ABRT --kill-after=5 $((budget_s + grace_s)) "$@"
    status=$?
    echo "== $file ended with status $status after $((SECONDS - started)) s$(memory_in_use)"
    ((status == 0)) || echo "$file: status $status after $((SECONDS - started)) s" >>"$OUT/failed.txt"
    pack
}

# Of the GPU, where it can be told: the next case may lack what this one left behind.
memory_in_use() {
    local used
    used=$(timeout 10 nvidia-smi --query-gpu=memory.used --format=csv,noheader 2>/dev/null) && echo ", $used in use"
}

bench() { # NAME SECONDS MODULE FLAG...
    local name=$1 seconds=$2
    shift 2
    if $dry; then
        seconds=600
    fi
    timed "$name.json" "$seconds" bash -c 'python3 -m "benchmarks.$0" --budget-s "$budget_s" "$@"' "$@" \
        --json "$OUT/$name.json" "${quick[@]}"
}

# In several processes: an error of the device spoils only what comes after it in the same one. Line by line: what
# is cut off has told how far it came.
tests() { # NAME SECONDS PROCESSES PATH...
    local name=$1 seconds=$2 processes=$3
    shift 3
    $dry || timed "$name.xml" "$seconds" env TRITON_INTERPRET=0 python3 -m pytest -v -W default --numprocesses "$processes" \
        --dist worksteal --junit-xml "$OUT/$name.xml" "$@"
}

on_device() { # NAME SECONDS MODULE FLAG...
    bench "$@" --device "$device"
}

arrays() { # NAME SECONDS FLAG...: random weights, arrays in
    on_device "$1" "$2" engine --rounds "$rounds" --slots "$slots" "${@:3}"
}

http() { # NAME SECONDS FLAG...: the whole server
    on_device "$1" "$2" serving --shape "$turbo" --tokens "$tokens" --one-at-a-time --uploads "$uploads" \
        --requests "$requests" --start-limit-s "$start_limit_s" "${@:3}"
}

first() {
    # Whether it is right: side by side, as nothing is timed.
    tests cuda-tests 90 4 tests/unit/engine/test_cuda.py &
    local right=($!)
    tests kernel-tests 90 4 tests/toolchain/kernels &
    right+=($!)
    on_device parity 75 parity --shape "$turbo" &
    right+=($!)
    if [[ -e $real ]]; then
        on_device real 100 parity --real "$real" &
        right+=($!)
    fi
    wait "${right[@]}"
    uploads_ready
    arrays turbo 45 --shape "$turbo" --tokens "$tokens" --in-flight 128 1 "$steady" --profile
    arrays turbo-beam 30 --shape "$turbo" --tokens "$tokens" --in-flight 128 1 --beam-size 5
    http http-clips 40 --repeats "$rounds" --length "${clip_lengths[@]}" --formats wav --concurrency 128
    http http-long 60 --repeats 1 --length long --formats "$long_formats" --concurrency "$num_long" 1 \
        --preprocess-workers "${threads[@]}" --serve="--beam-size 1"
    http http-long-beam 90 --repeats 1 --length long --formats "$long_formats" --concurrency 32 \
        --preprocess-workers "${threads[@]}"
}

second() {
    arrays large 35 --shape "$large" --tokens "$tokens" --in-flight 128 1
    # The published tables of a pipelined server: warm-up, mean, least and most latency, throughput, GPU busy.
    on_device workers 105 engine --shape "$turbo" --rounds 2 --slots 256 --tokens "$tokens" \
        --in-flight "${batches[@]}" --compute-workers "${workers[@]}" --copy-overlap off on
    arrays graphs-off 30 --shape "$turbo" --tokens "$tokens" --in-flight 128 1 --no-cuda-graphs
}

sweeps() {
    uploads_ready
    http http-threads 150 --repeats 1 --length long --formats "$long_formats" --concurrency 32 \
        --preprocess-workers "${more_threads[@]}"
    http http-loads 80 --repeats "$rounds" --length "${clip_lengths[@]}" --formats wav --concurrency "${at_once[@]}"
    arrays kernels 35 --shape "$turbo" --tokens "$tokens" --in-flight 128 1 --kernels "${kernels[@]}"
    arrays batches 35 --shape "$turbo" --tokens "$tokens" --in-flight "$steady" --encode-batch "${encode_batches[@]}"
    arrays lengths 60 --shape "$turbo" --one-at-a-time --in-flight 128 --tokens "$tokens" 60 150 --clip-s 30 5 10
    arrays word-times 30 --shape "$turbo" --tokens "$tokens" --in-flight 128 --word-times off on
}

systems() {
    local count
    for count in "${sharing[@]}"; do
        replicas "replicas-$count" "$count"
    done
    if $mps; then
        export CUDA_MPS_PIPE_DIRECTORY=$OUT/mps CUDA_MPS_LOG_DIRECTORY=$OUT/mps-log
        mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
        if timeout 20 nvidia-cuda-mps-control -d; then
            for count in "${sharing[@]}"; do
                replicas "replicas-$count-mps" "$count"
            done
            echo quit | timeout 20 nvidia-cuda-mps-control
        else
            echo "== no MPS daemon could be started here: left out"
        fi
        rm -rf "$CUDA_MPS_PIPE_DIRECTORY"
        unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    fi
}

replicas() { # NAME COUNT: so many on the GPU, short clips
    http "$1" 45 --repeats "$rounds" --length 5 --formats wav --concurrency 128 --serve="--replicas $2"
}

main() {
    if ! prepare; then
        echo "== failed: what .cache/gpu has cannot be installed"
        return
    fi
    $dry || warm_up "$@"
    for part in "$@"; do
        "$part"
    done
    python3 -m benchmarks.gpu_summary "$OUT"
}

log=$results/gpu-$1.log
main "$@" 2>&1 | tee "$OUT/log.txt" "$log"
touch "$OUT/expected.txt" "$OUT/failed.txt"
pack && rm "$log"
missing=$(sed 's|^|./|' "$OUT/expected.txt" | sort | comm -23 - <(tar --list --file "$archive" | sort))
failed=$(grep '^== failed' "$OUT/log.txt"; cat "$OUT/failed.txt")
rm -rf "$OUT"
[[ -z $failed ]] || printf '%s\n' "$failed"
[[ -z $missing ]] || printf 'no result of:\n%s\n' "$missing"
[[ -z $failed$missing ]] || exit 1
echo "all results are in $archive"
