"""Ranks of a test, each a process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from tests.replay.rank import end_rank, run_ranks


def reports_of(module: str, num_ranks: int, folder: Path) -> list[Any]:
    """Run a module on every rank; what each reports."""
    path = folder / "reports.json"
    run_ranks(module, num_ranks, path, timeout=1200)
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
