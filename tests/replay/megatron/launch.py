"""Ranks of a test, each a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from tests.replay.rank import end_rank

ROOT = Path(__file__).parents[3]


def reports_of(module: str, num_ranks: int, folder: Path) -> list[Any]:
    """Run a module on every rank; what each reports."""
    path = folder / "reports.json"
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*launch, "--nproc-per-node", str(num_ranks), "-m", module, str(path)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reports = json.loads(path.read_text())
    assert len(reports) == num_ranks
    return reports


def tell(path: Path, mine: Any) -> NoReturn:
    """Report what a rank has to, for `reports_of`, and end it."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(everyone))
    end_rank()
