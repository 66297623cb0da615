#!/bin/sh
# Makes an environment with one peer in it, and runs the tests that need it there, or python with other arguments.
#
#   tests/replay/peer.sh megatron-0.19.2 | megatron-0.16.1 | verifiers | trl [ARGUMENTS OF PYTHON]
#
# The environment borrows the packages of .venv and adds to them; it lies in $PEERS (default: build/peers) and is kept.
set -eu
peer=$1
shift
cd "$(dirname "$0")/../.."
home=${PEERS:-build/peers}/$peer
verl_imports="ray tensordict<=0.10 codetiming hydra-core cachetools torchdata datasets uvicorn fastapi
    pybind11 peft dill wandb pylatexenc tensorboard"

install() {
    grep -E '^(torch|transformers|numpy)==' constraints.txt > "$home/constraints.txt"
    "$home/bin/python" -m pip install -q -c "$home/constraints.txt" "$@"
}

if [ ! -e "$home/ready" ]; then
    .venv/bin/python -m venv "$home"
    own=$("$home/bin/python" -c 'import site; print(site.getsitepackages()[0])')
    .venv/bin/python -c 'import site; print(site.getsitepackages()[0])' > "$own/borrowed.pth"
    case $peer in
    megatron-0.16.1) install --no-deps megatron-core==0.16.1 ;;
    megatron-0.19.2)
        # It says that it needs Python 3.12, and runs on 3.11; it imports triton also where there is no GPU.
        install --no-deps --ignore-requires-python --no-binary=megatron-core megatron-core==0.19.2
        install --no-deps triton
        ;;
    verifiers) install verifiers==0.4.0 ;;
    trl) install trl==1.16.0 datasets matplotlib ;;
    *) echo "unknown peer $peer" >&2; exit 2 ;;
    esac
    case $peer in
    megatron-*)
        # verl asks for an older transformers; what is used of it here runs with this one.
        install --no-deps verl==0.9.1
        # shellcheck disable=SC2086
        install $verl_imports
        ;;
    esac
    touch "$home/ready"
fi
if [ $# = 0 ]; then
    case $peer in
    trl) set -- -m pytest tests/replay/trl tests/examples ;;
    *) set -- -m pytest tests/replay/megatron ;;
    esac
fi
OMP_NUM_THREADS=1 PYTHONPATH=src:. exec "$home/bin/python" "$@"
