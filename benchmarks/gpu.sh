#!/usr/bin/env bash
# All that is to be measured on a GPU, in four calls of at most 4, 8, 9 and 5 minutes (of ten that a call may take):
#   benchmarks/gpu_wheels.sh               beforehand, where there is a network: what a bare machine lacks
#   benchmarks/gpu.sh check                first: is all well, with real weights too, and where does a step go
#   benchmarks/gpu.sh headline             second: arrays in and the whole server at 128 and 1, transformers beside
#   benchmarks/gpu.sh sweeps               third: kernels, streams, lengths, 8-bit floats, concurrency
#   benchmarks/gpu.sh systems              with time left: threads, replicas that share the GPU, transport, executors, API
#   benchmarks/gpu.sh --limit-s 300 PART   begins nothing that would not end by then
#   benchmarks/gpu.sh --mps systems        also under an MPS daemon of its own, where the machine's rules allow it
#   benchmarks/gpu.sh --dry-run [PART...]  anywhere: every part on CPU, with a small shape (`make gpu-dry-run`)
# Each case writes its JSON when it ends. JSON, plots and the log come back as one archive in $OUT, or in
# benchmarks/results, which is written anew after each case; the log lies beside it until the end, for a call that
# is cut off. A case that fails, or has no result, is named, and ends the script with status 1. One that hangs is
# aborted, and says where each of its threads stood. Random weights, a fixed number of tokens a chunk. .cache/gpu must
# travel too. A machine that is still there finds what an earlier call installed, compiled and drew.
set -uo pipefail
cd "$(dirname "$0")/.."
results=${OUT:-benchmarks/results}
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 TQDM_DISABLE=1 TRANSFORMERS_VERBOSITY=error
ulimit -c 0 # an aborted process is not to write its memory to the disk

device=cuda turbo=large-v3-turbo large=large-v3 clips=128 tokens=100 rounds=3 peer=bfloat16:64
real=.cache/gpu/real.tar.gz
declare -A limits_s=([check]=240 [headline]=480 [sweeps]=540 [systems]=300) # of a call, from its first second to its last
threads=(8) more_threads=(2 8 16 4) workers=(1 2 4) sharing=(1 2 3) quick=() mps=false dry=false most_s=560
slots=128 brief=() executors=(inline multiprocess ray) kernels=(torch triton)
long_formats=wav,flac,wav,flac,wav,mp3 clip_lengths=(5 30) requests=512 formats=(wav,flac,mp3 wav flac mp3) at_once=(128 1 8 32 512)
while [[ ${1:-} == --* ]]; do
    case $1 in
    --mps) mps=true ;;
    --limit-s) most_s=$2 && shift ;;
    --dry-run)
        dry=true device=cpu turbo=pocket large=pocket clips=4 tokens=20 rounds=1 peer=float32:4
        threads=(1) workers=(2) sharing=(2) quick=(--quick)
        slots=8 brief=(--budget-s 5) executors=(inline) kernels=(torch)
        clip_lengths=(5) requests=4 formats=(wav,flac,mp3) at_once=(128 1)
        ;;
    *) echo "unknown: $1" >&2 && exit 2 ;;
    esac
    shift
done
if (($# == 0)); then
    set -- check headline sweeps systems
fi
limit_s=0
for part in "$@"; do
    limit_s=$((limit_s + ${limits_s[$part]:?there is no such part}))
done
limit_s=$((limit_s < most_s ? limit_s : most_s))
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

# What a bare machine reads, draws and writes for the first time is not to count as the first case's.
warm_up() { # PART...
    local shapes=("$turbo")
    [[ " $* " == *" headline "* || " $* " == *" sweeps "* ]] && shapes+=("$large")
    timeout 90 python3 -m benchmarks.gpu_machine
    timeout 90 python3 -m benchmarks.checkpoints --shape "${shapes[@]}" --device "$device"
    echo "== ready after $SECONDS s"
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
    $dry || timed "$name.xml" "$seconds" env TRITON_INTERPRET=0 python3 -m pytest -v -W default --numprocesses "$processes" \
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
    # Whether it is right: side by side, as nothing is timed.
    tests cuda-tests 110 5 tests/engine/test_cuda.py &
    tests kernel-tests 110 5 tests/model/kernels tests/model/test_float8.py tests/engine/test_tokens_likeliest.py &
    on_device parity 110 parity --shape "$turbo" &
    [[ ! -e $real ]] || on_device real 110 real_parity "$real" &
    wait
    on_device profile 60 engine --shape "$turbo" --in-flight 1 128 --tokens 100 --rounds 2 --slots "$slots" \
        --profile --trace "$OUT/profile-trace.json.gz"
    on_device http-first 60 serving --shape "$turbo" --tokens "$tokens" --repeats 1 --length 5 --formats wav \
        --concurrency 32 --requests "$((requests < 128 ? requests : 128))"
}

headline() {
    local engine=(engine --rounds "$rounds" --slots "$slots" --in-flight 128 1 --tokens 100)
    local http=(serving --shape "$turbo" --tokens "$tokens" --repeats "$rounds" --one-at-a-time)
    on_device turbo 60 "${engine[@]}" --shape "$turbo"
    on_device http-long 200 "${http[@]}" --length long --formats "$long_formats" --concurrency 128 1 \
        --preprocess-workers "${threads[@]}" --plot "$OUT/http-long.png"
    on_device http-clips 60 "${http[@]}" --length "${clip_lengths[@]}" --formats wav --concurrency 128 1 \
        --requests "$requests" --plot "$OUT/http-clips.png"
    on_device large 60 "${engine[@]}" --shape "$large"
    on_device peers 60 shapes --tokens "$tokens" --clips "$clips" --rounds "$rounds" --shape "$turbo" \
        --ours arrays --peers "transformers:$peer" --plot "$OUT/peers.png"
}

sweeps() {
    local common=(--rounds "$rounds" --slots "$slots")
    # What each kernel takes by itself, the trial at load tells: it is part of every result.
    on_device graphs-off 40 engine "${common[@]}" --shape "$turbo" --in-flight 128 1 --tokens 100 --no-cuda-graphs
    on_device kernels 70 engine "${common[@]}" --shape "$turbo" --in-flight 128 1 --tokens 100 \
        --kernels "${kernels[@]}"
    on_device workers 110 engine "${common[@]}" --shape "$turbo" --in-flight 128 8 32 --tokens 100 \
        --compute-workers "${workers[@]}" --copy-overlap off on --plot "$OUT/workers.png"
    on_device lengths 90 engine "${common[@]}" --shape "$turbo" --one-at-a-time \
        --in-flight 128 8 32 512 --tokens 100 60 150 --clip-s 30 5 10 --plot "$OUT/lengths.png"
    on_device fp8 60 engine "${common[@]}" --shape "$large" --in-flight 128 --tokens 100 --fp8
    on_device http-loads 150 serving --shape "$turbo" --tokens "$tokens" --repeats "$rounds" --one-at-a-time \
        --length "${clip_lengths[@]}" --formats "${formats[@]}" --concurrency "${at_once[@]}" \
        --requests "$requests" --plot "$OUT/http-loads.png"
}

systems() {
    local count
    $dry || on_device http-threads 140 serving --shape "$turbo" --tokens "$tokens" --repeats "$rounds" \
        --length long --formats wav,flac,mp3 --concurrency 32 --preprocess-workers "${more_threads[@]}" \
        --plot "$OUT/http-threads.png"
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
    bench transport 60 transport "${brief[@]}"
    bench executors 60 executors --executors "${executors[@]}" "${brief[@]}"
    $dry || bench api-process 60 api_process --rounds "$rounds" --preprocess-workers 4
}

replicas() { # NAME COUNT: so many on the GPU, short clips
    on_device "$1" 70 serving --shape "$turbo" --tokens "$tokens" --repeats "$rounds" --length 5 --formats wav \
        --concurrency 128 --requests "$requests" --serve "--replicas $2"
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
    if $dry; then
        python3 -m benchmarks.dry_run "$OUT/cases.txt" 0 &
        python3 -m benchmarks.dry_run "$OUT/cases.txt" 1
        wait
        rm -f "$OUT"/claimed-*
    fi
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
