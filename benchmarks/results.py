"""Where a measurement is written, and what it says about where it was made."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

FOLDER = Path(__file__).parent / "results"


def describe_run(packages: tuple[str, ...]) -> dict[str, Any]:
    """Machine, versions, commit and day."""
    return {
        "date": date.today().isoformat(),
        "commit": _commit(),
        "cpu": _cpu(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
    }


def write_result(name: str, result: dict[str, Any]) -> Path:
    """Write one measurement as JSON; a later run on the same machine replaces it."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


def spread(samples: list[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": median(samples), "min": min(samples), "max": max(samples)}


def _commit() -> str:
    """The commit that was measured; a copy without its history has none."""
    command = ["git", "describe", "--always", "--dirty"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
