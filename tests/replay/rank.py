"""Processes that are the ranks of a test: how they are launched, and how each ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

ROOT = Path(__file__).parents[2]


def run_ranks(module: str, num_ranks: int, *arguments: str | Path, timeout: float = 300) -> str:
    """Run a module in so many processes (gloo); what they print. All must end with status 0."""
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launch, "--nproc-per-node", str(num_ranks), "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def end_rank() -> NoReturn:
    """End this process, once all have come here, without tearing the interpreter down.

    All was told by now. A thread of gloo's that outlives the last line aborts the process at the interpreter's end, in
    one run of some hundred.
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
