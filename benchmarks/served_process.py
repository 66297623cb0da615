"""A server started with `routebook serve`, and what the kernel says about it and its worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.executor_speed import process_time_of

_SAID = "routebook serves at "
_STOP_S = 30


class ServedProcess:
    """A running server: the process with the event loop and the engine, and the worker's."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        (self.worker_pid,) = _children(process.pid)

    def memory_nbytes(self) -> dict[str, int]:
        """Resident memory of each process, with what was swapped out of it."""
        return {"server": _memory(self.process.pid), "worker": _memory(self.worker_pid)}

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time of each process so far."""
        return {
            "server": process_time_of(self.process.pid),
            "worker": process_time_of(self.worker_pid),
        }

    def what_is_left(self) -> list[str]:
        """What the server still holds once all its clients have gone; nothing, if all is well."""
        with httpx.Client(base_url=self.url, timeout=60) as http:
            held = _settle(http)
            answer = http.post("/check_integrity")
        if answer.status_code != 200:
            held.append(f"check_integrity: {answer.text}")
        return held


@contextmanager
def served(*options: str) -> Iterator[ServedProcess]:
    """Serve with these options; a server that does not end by itself when told to is an error."""
    command = [sys.executable, "-m", "routebook.cli.main", "serve", *options, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith(_SAID):
                raise SystemExit(f"the server did not start; it said {line!r}")
            yield ServedProcess(process, line.removeprefix(_SAID).strip())
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def _settle(http: httpx.Client) -> list[str]:
    """Wait until the server is idle; what it holds if it does not get there."""
    names = ("routebook_jobs_open", "routebook_completions_open", "routebook_completions_held")
    end = time.monotonic() + 30
    while True:
        lines = http.get("/metrics").raise_for_status().text.splitlines()
        gauges = dict(line.split() for line in lines if line.startswith(names))
        held = [f"{name}={gauges[name]}" for name in names if float(gauges[name])]
        if not held or time.monotonic() > end:
            return held
        time.sleep(0.1)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def _memory(pid: int) -> int:
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return sum(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmSwap"))


def loaded() -> float:
    """Threads of the whole machine that run or want to, in the mean of the last minute."""
    return os.getloadavg()[0]
