"""The state machine for hours: `python -m tests.engine.soak --examples 100000 --seed 0`.

Examples come in batches, each with a seed of its own, so that a batch that fails can be run again alone. Exit status 1
and the falsifying example, made small, on the first wrong, missing or leaked row.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import active_children, get_context

from tests.engine.machine import TaggedMachine, TinyMachine, run_machine
from tests.engine.totals import Totals

BATCH = 250
_TINY_SHARE = 50
"""One example in so many is of the bundled model, which takes ten times as long."""


def run_batch(seed: int, num_examples: int) -> Totals:
    """Run examples of both models; raises what went wrong."""
    import torch

    torch.set_num_threads(1)
    totals, num_tiny = Totals(), num_examples // _TINY_SHARE
    run_machine(TaggedMachine, num_examples - num_tiny, totals, with_seed=seed)
    if num_tiny:
        run_machine(TinyMachine, num_tiny, totals, with_seed=seed)
    return totals


def soak(
    num_examples: int,
    first_seed: int,
    num_processes: int,
    run: Callable[[int, int], Totals] = run_batch,
) -> int:
    """Run all batches, each by `run(seed, examples)` in a process; returns the exit status."""
    sizes = [BATCH] * (num_examples // BATCH) + [num_examples % BATCH] * (num_examples % BATCH > 0)
    pool = ProcessPoolExecutor(num_processes, mp_context=get_context("spawn"))
    status = 1
    try:
        status = _collect(
            {
                pool.submit(run, first_seed + number, size): first_seed + number
                for number, size in enumerate(sizes)
            }
        )
    finally:
        pool.shutdown(wait=status == 0, cancel_futures=True)
        # Where it failed or was interrupted nobody waits for the batches that run.
        for process in active_children():
            process.terminate()
    return status


def _collect(seeds: dict[Future[Totals], int]) -> int:
    totals, begin, waiting = Totals(), time.monotonic(), set(seeds)
    while waiting:
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            if future.exception() is not None:
                _report(future, seeds[future])
                return 1
            totals.add(future.result())
        print(f"{time.monotonic() - begin:.0f} s: {totals}", flush=True)
    return 0


def _report(future: Future[Totals], seed: int) -> None:
    error = future.exception()
    assert error is not None
    traceback.print_exception(error)
    print(f"again: python -m tests.engine.soak --examples {BATCH} --seed {seed}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.engine.soak",
        description="Run the state machine over the engine. 100,000 examples take about forty minutes on two cores"
        " that have nothing else to do.",
    )
    parser.add_argument("--examples", type=int, default=100_000, help="how many (100000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first batch (0)")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="at once (one per core)"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return soak(args.examples, args.seed, args.processes)


if __name__ == "__main__":
    sys.exit(main())
