#!/usr/bin/env bash
# Write the packages of the image with their hashes, in the versions of constraints.txt: tools/lock.sh UV
set -euo pipefail
cd "$(dirname "$0")/.."
uv=$1 all=$(mktemp)
trap 'rm -f "$all"' EXIT
compile() {
    "$uv" pip compile --quiet --no-config --constraint constraints.txt --generate-hashes --no-header --no-annotate \
        --python-version 3.11 --python-platform x86_64-manylinux_2_28 "$@"
}
compile pyproject.toml --extra jobs > "$all"
# A package is a line that is not indented, with its hashes below it.
split() { awk -v "wanted=$1" '/^[a-z]/ { is_cuda = /^(torch|triton|nvidia-|cuda-)/ } is_cuda == wanted'; }
{ echo "# By make lock: all of the image's packages but PyTorch."; split 0 < "$all"; } > image/requirements.txt
{ echo "# By make lock: PyTorch of the package index, with CUDA."; split 1 < "$all"; } > image/torch.txt
{ echo "# By make lock: what installs PyTorch of its own index."; echo uv | compile -; } > image/uv.txt
