"""Does a server under load lose rows, leak, or slow down those who did not ask for rows?

    python -m benchmarks.server_load --minutes 10

`routebook serve tiny` over loopback, with its worker in a process of its own. Four clients send requests without rows,
one after the other, and time them. Eight others, in a process of their own that yields to the rest, send requests half
of which are cut off at a random moment and half of which ask for rows; streams and whole answers are mixed, as are
the formats of rows. Windows with and without others who ask for rows alternate: in the two windows of a pair
the same clients draw the same requests, but for the rows.

Every answer that is read to its end is checked: as many tokens as were asked for, one row for each but the last, rows
that belong to these tokens, and for a fixed set of prompts the very rows that an engine without a server gives. At
the end the server must hold nothing, and recounts itself. The exit status is 1 if a row is lost, something is left
over or memory grows by more than 5 % after the first minute, and 2 if only the latency differs by more than 3 %.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from benchmarks.load_requests import (
    FIXED,
    FIXED_PARAMS,
    Expected,
    Tally,
    draw_measured,
    draw_other,
    run_load,
)
from benchmarks.results import describe_run, write_result
from benchmarks.served_process import ServedProcess, loaded, served
from routebook import LLM

MEASURED, OTHERS = 4, 8
WARM_UP_S = 60.0
MOST_GROWTH, MOST_SLOWDOWN = 1.05, 1.03
_YIELDS = 5
"""By how much the others' process is nicer: what they do with their rows is not the server's work."""
_DRAWS = 2000
_PACKAGES = ("torch", "numpy", "fastapi", "uvicorn", "uvloop", "httpx", "msgspec", "pyzmq")


@dataclass(slots=True)
class Window:
    """What was seen while the others did, or did not, ask for rows."""

    rows: bool
    seconds: list[float]
    """Latencies of those who did not ask."""
    num_others: int
    """Requests that the others have sent."""
    cpu: dict[str, float]
    """CPU seconds of server and worker per request of anybody."""


@dataclass(slots=True)
class Seen:
    """All that was seen."""

    tally: Tally = field(default_factory=Tally)
    windows: list[Window] = field(default_factory=list)
    memory: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    load: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--window", type=float, default=8.0, help="seconds of a window")
    parser.add_argument("--name", default="server_load", help="of the file of results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    expected = offline_rows()
    options = ("tiny", "--dtype", "float32", "--max-model-len", "256", "--num-blocks", "512")
    with served(*options) as server:
        seen = asyncio.run(load(server, expected, arguments.minutes * 60, arguments.window))
        left = server.what_is_left()
    result = describe_run(_PACKAGES) | {"minutes": arguments.minutes} | summary(seen, left)
    print(f"wrote {write_result(arguments.name, result)}")
    sys.exit(tell(result))


def offline_rows() -> Expected:
    """Greedy rows of the fixed prompts, each computed alone, by an engine without a server."""
    llm = LLM("tiny", dtype="float32", max_model_len=256, prefix_caching=False)
    found = {}
    for prompt in FIXED:
        (output,) = llm.generate([list(prompt)], FIXED_PARAMS)
        record = output.choices[0].routed_experts
        assert record is not None
        found[prompt] = record.ids_TLK
    llm.shutdown()
    return found


async def load(server: ServedProcess, expected: Expected, seconds: float, length: float) -> Seen:
    """Windows of some seconds, with and without rows in turns, and samples of memory beside them."""
    seen, began = Seen(), time.monotonic()
    sampling = asyncio.create_task(_sample(server, seen, began))
    with ProcessPoolExecutor(1, get_context("spawn"), os.nice, (_YIELDS,)) as pool:
        # The first window would have what is done only once.
        await _window(server, expected, pool, seen, number=-1, rows=True, length=length)
        number = 0
        while number == 0 or time.monotonic() - began < seconds:
            # With, without, without, with: a machine that gets slower does not favour one of them.
            for rows in (True, False) if number % 2 == 0 else (False, True):
                seen.windows.append(
                    await _window(
                        server, expected, pool, seen, number=number, rows=rows, length=length
                    )
                )
            number += 1
    sampling.cancel()
    return seen


async def _window(
    server: ServedProcess,
    expected: Expected,
    pool: ProcessPoolExecutor,
    seen: Seen,
    *,
    number: int,
    rows: bool,
    length: float,
) -> Window:
    before = server.cpu_seconds()
    others = asyncio.get_running_loop().run_in_executor(
        pool, run_others, server.url, expected, number, rows, length
    )
    measured = run_load(
        server.url,
        partial(draw_measured, random.Random(number)),
        expected,
        MEASURED,
        length,
    )
    mine, theirs = await asyncio.gather(measured, others)
    after = server.cpu_seconds()
    seen.tally.add(mine)
    seen.tally.add(theirs)
    num = sum(t.counts["streamed"] + t.counts["whole"] for t in (mine, theirs))
    return Window(
        rows=rows,
        seconds=mine.seconds,
        num_others=theirs.counts["streamed"] + theirs.counts["whole"],
        cpu={name: (after[name] - before[name]) / num for name in after},
    )


def run_others(url: str, expected: Expected, number: int, rows: bool, length: float) -> Tally:
    """The clients whose latency does not count, in a process of their own."""
    draw = partial(draw_other, random.Random(-1 - number), rows=rows)
    return asyncio.run(run_load(url, draw, expected, OTHERS, length))


async def _sample(server: ServedProcess, seen: Seen, began: float) -> None:
    while True:
        seen.memory.append((time.monotonic() - began, server.memory_nbytes()))
        seen.load.append(loaded())
        await asyncio.sleep(1)


def summary(seen: Seen, left: list[str]) -> dict[str, Any]:
    """All figures."""
    return {
        "counts": dict(seen.tally.counts),
        "losses": seen.tally.losses,
        "left_at_the_end": left,
        "memory": {name: _memory(seen, name) for name in ("server", "worker")},
        "latency": _latency(seen),
        "cpu_ms_per_request": {name: _cpu(seen, name) for name in ("server", "worker")},
        "requests_of_others_ratio": _of(seen, True, lambda w: w.num_others)
        / _of(seen, False, lambda w: w.num_others),
        "machine_load": {
            "median": float(np.median(seen.load)),
            "max": max(seen.load),
            "cpus": os.cpu_count(),
        },
    }


def _memory(seen: Seen, name: str) -> dict[str, float]:
    """Megabytes at the end of the first minute, and the most after it."""
    last = seen.memory[-1][0]
    warm_up = min(WARM_UP_S, last / 4)
    values = [(at, sample[name] / 2**20) for at, sample in seen.memory if at >= warm_up]
    first, end = values[0][1], float(np.median([value for _, value in values[-10:]]))
    most = max(value for _, value in values)
    return {
        "first": first,
        "end": end,
        "most": most,
        "growth": most / first,
        "begin": seen.memory[0][1][name] / 2**20,
    }


def _latency(seen: Seen) -> dict[str, Any]:
    """Percentiles with and without others who ask for rows, and how far chance alone would move their ratio."""
    pairs = [seen.windows[at : at + 2] for at in range(0, len(seen.windows), 2)]
    found: dict[str, Any] = {"pairs_of_windows": len(pairs)}
    for name, percent in (("p50", 50), ("p95", 95)):
        with_rows, without = (_percentile(pairs, rows, percent) for rows in (True, False))
        draw = np.random.default_rng(0)
        ratios = [
            _percentile(again, True, percent) / _percentile(again, False, percent)
            for again in (
                [pairs[i] for i in draw.integers(0, len(pairs), len(pairs))] for _ in range(_DRAWS)
            )
        ]
        found[name] = {
            "seconds_with_rows": with_rows,
            "seconds_without": without,
            "ratio": with_rows / without,
            "ratio_95_percent_interval": np.percentile(ratios, [2.5, 97.5]).tolist(),
        }
    return found


def _percentile(pairs: list[list[Window]], rows: bool, percent: float) -> float:
    values = [s for pair in pairs for window in pair if window.rows is rows for s in window.seconds]
    return float(np.percentile(values, percent))


def _cpu(seen: Seen, name: str) -> dict[str, float]:
    with_rows, without = (_of(seen, rows, lambda w: w.cpu[name]) for rows in (True, False))
    return {"with_rows": with_rows * 1e3, "without": without * 1e3, "ratio": with_rows / without}


def _of(seen: Seen, rows: bool, value: Callable[[Window], float]) -> float:
    return float(np.mean([value(window) for window in seen.windows if window.rows is rows]))


def tell(result: dict[str, Any]) -> int:
    """Say what was found; the exit status."""
    for name in ("counts", "losses", "left_at_the_end", "memory", "latency"):
        print(f"{name}: {result[name]}")
    for name in ("cpu_ms_per_request", "requests_of_others_ratio", "machine_load"):
        print(f"{name}: {result[name]}")
    grown = [name for name, one in result["memory"].items() if one["growth"] > MOST_GROWTH]
    if result["losses"] or result["left_at_the_end"] or grown:
        print(f"FAILED: rows lost, something left, or memory grown ({grown})")
        return 1
    slower = [p for p in ("p50", "p95") if result["latency"][p]["ratio"] > MOST_SLOWDOWN]
    if slower:
        print(f"SLOWER than allowed: {slower}")
        return 2
    return 0


if __name__ == "__main__":
    main()
