"""How fast the ledger stores and reads, as ratios to a bare copy of the same bytes in the same run.

    python benchmarks/ledger_speed.py

Times are CPU seconds of this process: on a busy machine being descheduled costs nothing, shared caches still do.
Each round visits every case once; the median over the rounds counts. Prints ratios, writes
`results/ledger_speed.json`.

Legend of shape suffixes: T = rows, L = MoE layers, K = top-k.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from routebook.ledger import LedgerConfig, ReleaseReason, RequestLedger, StepRows
from routebook.routes.schema import RouteSchema

SCHEMA = RouteSchema(layer_ids=tuple(range(48)), num_experts=128, top_k=8, num_hidden_layers=48)
BLOCK_SIZE = 16
ROUNDS = 15
DECODE_REQUESTS = 256
PREFILL_REQUESTS = 4
PREFILL_ROWS = 8192
READ_ROWS = (4096, 32768)
RESULT = Path(__file__).parent / "results" / "ledger_speed.json"

Case = Callable[[], float]


def seconds(work: Callable[[], object]) -> float:
    begin = time.process_time_ns()
    work()
    return (time.process_time_ns() - begin) / 1e9


def random_ids(count: int) -> np.ndarray:
    rng = np.random.default_rng(count)
    return rng.integers(0, SCHEMA.num_experts, SCHEMA.shape(count), dtype=np.uint8)


def make_step(names: list[str], starts: np.ndarray, count: int, ids_TLK: np.ndarray) -> StepRows:
    return StepRows(
        request_ids=names,
        starts_R=starts,
        counts_R=np.full(len(names), count, np.int64),
        ids_TLK=ids_TLK,
        weight_version=0,
    )


def copy_case(num_rows: int) -> Case:
    """A copy between two arrays whose pages exist."""
    source, target = random_ids(num_rows), random_ids(num_rows)
    return lambda: seconds(lambda: np.copyto(target, source))


def fresh_copy_case(num_rows: int) -> Case:
    """A copy into a new array: what a read must do, since it returns private memory."""
    source = random_ids(num_rows)
    return lambda: seconds(source.copy)


def prefill_case(ledger: RequestLedger) -> Case:
    names = [f"prefill-{i}" for i in range(PREFILL_REQUESTS)]
    count = PREFILL_ROWS // PREFILL_REQUESTS
    step = make_step(names, np.zeros(len(names), np.int64), count, random_ids(PREFILL_ROWS))

    def measure() -> float:
        for name in names:
            ledger.begin(name, count)
        spent = seconds(lambda: ledger.store_batch(step))
        for name in names:
            ledger.release(name, ReleaseReason.FINISHED)
        return spent

    return measure


def decode_case(ledger: RequestLedger, num_steps: int) -> Case:
    """One row of each request, at staggered positions, so that some blocks begin in every step."""
    names = [f"decode-{i}" for i in range(DECODE_REQUESTS)]
    position = np.arange(DECODE_REQUESTS, dtype=np.int64)
    ids_TLK = random_ids(DECODE_REQUESTS)
    for name, start in zip(names, position.tolist(), strict=True):
        ledger.begin(name, 0)
        if start:
            ledger.store_batch(make_step([name], np.zeros(1, np.int64), start, random_ids(start)))

    def measure() -> float:
        spent = 0.0
        for _ in range(num_steps):
            step = make_step(names, position.copy(), 1, ids_TLK)
            spent += seconds(lambda: ledger.store_batch(step))  # noqa: B023
            position[:] += 1
        return spent / num_steps

    return measure


def read_case(ledger: RequestLedger, name: str, num_rows: int) -> Case:
    """A whole request, stored in one step."""
    ledger.begin(name, num_rows)
    ledger.store_batch(make_step([name], np.zeros(1, np.int64), num_rows, random_ids(num_rows)))
    return lambda: seconds(lambda: ledger.read(name, 0, num_rows))


def full_ledger(num_rows: int) -> RequestLedger:
    """A ledger whose free chunks, enough for `num_rows`, have no free neighbour."""
    ledger = RequestLedger(SCHEMA, BLOCK_SIZE, LedgerConfig(initial_rows=2 * num_rows))
    ledger.begin("filler", 0)
    for block in range(0, 2 * num_rows // BLOCK_SIZE, 2):
        ledger.publish("filler", block, b"%d" % block)
    count, ids_TLK = 2 * num_rows, random_ids(2 * num_rows)
    ledger.store_batch(make_step(["filler"], np.zeros(1, np.int64), count, ids_TLK))
    # What is published stays: every second block.
    ledger.release("filler", ReleaseReason.FINISHED)
    return ledger


def tail_case(ledger: RequestLedger, num_rows: int, count: int) -> Case:
    """The last `count` rows of a request that `read_case` has made."""
    name = f"adjacent-{num_rows}"
    return lambda: seconds(lambda: ledger.read(name, num_rows - count, num_rows))


def all_cases() -> dict[str, Case]:
    ledger = RequestLedger(SCHEMA, BLOCK_SIZE, LedgerConfig(initial_rows=100_000))
    # Of its own: requests that grow beside it would move the free chunks, and so the pages, in every round.
    prefill = RequestLedger(SCHEMA, BLOCK_SIZE, LedgerConfig(initial_rows=PREFILL_ROWS))
    cases = {
        f"copy {PREFILL_ROWS}": copy_case(PREFILL_ROWS),
        f"store prefill {PREFILL_ROWS}": prefill_case(prefill),
        f"copy {DECODE_REQUESTS}": copy_case(DECODE_REQUESTS),
        f"store decode {DECODE_REQUESTS}": decode_case(ledger, 32),
    }
    for num_rows in READ_ROWS:
        cases[f"fresh copy {num_rows}"] = fresh_copy_case(num_rows)
        cases[f"read adjacent {num_rows}"] = read_case(ledger, f"adjacent-{num_rows}", num_rows)
        cases[f"read scattered {num_rows}"] = read_case(
            full_ledger(num_rows), "scattered", num_rows
        )
        cases[f"read last 256 of {num_rows}"] = tail_case(ledger, num_rows, 256)
    return cases


def main() -> None:
    cases = all_cases()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, case in cases.items():
            times[name].append(case())
    median = {name: statistics.median(spent) for name, spent in times.items()}
    ratios = {}
    for name, spent in median.items():
        if name.startswith(("store", "read adjacent", "read scattered")):
            bare = "copy" if name.startswith("store") else "fresh copy"
            rows = name.rsplit(" ", 1)[1]
            ratios[f"{name} / {bare} {rows}"] = round(spent / median[f"{bare} {rows}"], 2)
    decode = median[f"store decode {DECODE_REQUESTS}"]
    ratios[f"store decode {DECODE_REQUESTS} / 0.2 ms"] = round(decode / 2e-4, 2)
    first, last = (f"read last 256 of {n}" for n in READ_ROWS)
    ratios[f"{last} / {first}"] = round(median[last] / median[first], 2)
    for name, ratio in ratios.items():
        print(f"{ratio:8.2f}  {name}")
    RESULT.parent.mkdir(exist_ok=True)
    facts = {"python": platform.python_version(), "numpy": np.__version__}
    report = {"ratios": ratios, "cpu_seconds": median, "rounds": ROUNDS, **facts}
    RESULT.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
