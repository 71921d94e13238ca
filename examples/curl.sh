#!/usr/bin/env bash
# The API from the command line: text, subtitles, a stream, and the times of words.
#   examples/curl.sh [RECORDING] [BASE_URL]
set -euo pipefail
recording=${1:-examples/speech.wav}
base_url=${2:-http://127.0.0.1:8000/v1}
transcribe=(curl --silent --show-error --fail-with-body "$base_url/audio/transcriptions"
    --header "Authorization: Bearer ${OPENAI_API_KEY:-none}" --form model=whisper-1 --form "file=@$recording")

echo "== text"
"${transcribe[@]}" --form response_format=text
echo
echo "== srt"
"${transcribe[@]}" --form response_format=srt
echo "== stream"
"${transcribe[@]}" --no-buffer --form stream=true
echo "== words"
"${transcribe[@]}" --form response_format=verbose_json --form 'timestamp_granularities[]=word'
echo
