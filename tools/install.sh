#!/usr/bin/env bash
# Install the server from this checkout into .venv: tools/install.sh [EXTRA,EXTRA]
#   TORCH=auto   the default. pip, if its configuration names an index or wheels; else cpu on Linux without an
#                NVIDIA GPU, pypi where PyTorch's own wheels cannot be reached; else pypi.
#   TORCH=pypi   PyTorch of the package index. On Linux it brings CUDA.
#   TORCH=cpu    PyTorch's own wheels without CUDA. So cu130 and the other backends of uv.
#   TORCH=pip    what pip takes, by its configuration.
set -euo pipefail
cd "$(dirname "$0")/.."
interpreter=${PYTHON:-python3} python=.venv/bin/python torch=${TORCH:-auto}
wanted=(install --constraint constraints.txt --editable ".${1:+[$1]}")

choose_torch() {
    if $python -m pip config list | grep -E '(index-url|find-links|no-index)=' > /dev/null; then
        echo pip
    elif [ "$(uname)" = Linux ] && [ ! -e /dev/nvidiactl ] && ! command -v nvidia-smi > /dev/null; then
        echo cpu
    else
        echo pypi
    fi
}

size_of() {
    case $1-$(uname) in
        cpu-* | pypi-Darwin) echo "PyTorch for the CPU: 0.3 GB to download, 1.2 GB on disk" ;;
        pypi-*) echo "PyTorch for CUDA: 2.8 GB to download, 5.7 GB on disk (TORCH=cpu: 0.3 GB, 1.2 GB)" ;;
        pip-*) echo "the PyTorch that pip is configured for (CUDA: 2.8 GB to download, CPU: 0.3 GB)" ;;
        *) echo "PyTorch for $1 (CUDA: about 3 GB to download)" ;;
    esac
}

install_by_uv() {
    $python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
    if ! .venv/bin/uv pip "${wanted[@]}" --system-certs --python $python "$@"; then
        echo "Not installed. If PyTorch's own wheels cannot be reached, use TORCH=pypi"
        return 1
    fi
}

# Where nobody asked for PyTorch's own wheels, those of the package index do as well.
install_otherwise() {
    if [ -z "${is_free:-}" ]; then return 1; fi
    echo "Installing into .venv with $(size_of pypi) instead."
    install_by_uv
}

install() {
    if ! "$interpreter" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "$interpreter is not Python 3.11 or later; name one that is, such as PYTHON=python3.12"
        return 1
    fi
    if [ ! -x $python ]; then "$interpreter" -m venv .venv; fi
    if [[ "$(ldd --version 2>&1 || true)" == *musl* ]]; then
        echo "PyTorch has no wheels for musl (Alpine): use a system with glibc, or the container image"
        return 1
    fi
    if [ "$torch" = auto ]; then torch=$(choose_torch) is_free=1; fi
    echo "Installing into .venv with $(size_of "$torch")."
    case $torch in
        pip) $python -m pip "${wanted[@]}" --quiet ;;
        pypi) install_by_uv ;;
        *) install_by_uv --torch-backend "$torch" || install_otherwise ;;
    esac
}

install >&2
