"""What it costs one trainer rank to take its rows out of a batch, beside the plain way and the memory's limit.

    python -m benchmarks.ingest_speed

64 packed samples of about 8k tokens of a Qwen3-30B-A3B shape (48 layers, top 8 of 128), context parallelism of 4
(zigzag), one rank; once with all layers, once with the 12 layers of one of 4 pipeline stages. Cases:

    naive              the whole batch widened to int64 and packed, then the rank's rows and layers taken out
    naive, by sample   each sample widened as a whole, then its two pieces taken, then all joined
    rows_for           ours, into memory that is used again; fresh: into new memory; narrow: one byte an id
    check              the micro-batch made: tokens of all samples hashed and compared, once for all its layers
    fill               the limit: memset of as many bytes as the int64 result has
    copy               the limit of the narrow result: memmove of as many bytes

Results of the naive ways and of ours are compared before anything is measured. Times are CPU seconds of this process,
on one thread: on a busy machine being descheduled costs nothing. Each round visits every case once; the median over
the rounds counts, and ratios are taken within the run.

Prints a table, writes `results/ingest_speed.json`. Needs 5 GB of memory.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.results import describe_run, spread, write_result
from routebook.routes import (
    MicroBatch,
    PackedSequences,
    ParallelPlan,
    ParallelRank,
    RankRows,
    RoutedExperts,
    RouteSchema,
    RowLayout,
)

SCHEMA = RouteSchema(layer_ids=tuple(range(48)), num_experts=128, top_k=8, num_hidden_layers=48)
SAMPLES = 64
CONTEXT_PARALLEL = 4
CONTEXT_RANK = 1
PIPELINE_STAGES = {"all layers": 1, "12 layers": 4}
ROUNDS = 9

Case = Callable[[], Any]


def make_samples() -> tuple[list[RoutedExperts], list[np.ndarray]]:
    rng = np.random.default_rng(0)
    records, tokens = [], []
    for num_tokens in rng.integers(7_600, 8_500, SAMPLES).tolist():
        tokens.append(rng.integers(0, 150_000, num_tokens).astype(np.int32))
        ids = rng.integers(0, 128, SCHEMA.shape(num_tokens - 1), np.uint8)
        records.append(RoutedExperts.from_rows(SCHEMA, ids, tokens[-1]))
    return records, tokens


def padded_to(length: int) -> int:
    multiple = 2 * CONTEXT_PARALLEL
    return -(-length // multiple) * multiple


def widen_sample(record: RoutedExperts) -> np.ndarray:
    wide = record.ids_TLK.astype(np.int64)
    missing = padded_to(record.stop + 1) - record.stop
    return np.concatenate([wide, np.full(SCHEMA.shape(missing), -1, np.int64)])


def own_positions(num_rows: int) -> tuple[slice, slice]:
    chunk = num_rows // (2 * CONTEXT_PARALLEL)
    back = 2 * CONTEXT_PARALLEL - 1 - CONTEXT_RANK
    return (
        slice(CONTEXT_RANK * chunk, (CONTEXT_RANK + 1) * chunk),
        slice(back * chunk, (back + 1) * chunk),
    )


def naive(records: list[RoutedExperts], layers: slice) -> np.ndarray:
    packed = np.concatenate([widen_sample(record) for record in records])
    rows, first = [], 0
    for record in records:
        num_rows = padded_to(record.stop + 1)
        rows += [np.arange(num_rows)[piece] + first for piece in own_positions(num_rows)]
        first += num_rows
    return np.ascontiguousarray(packed[np.concatenate(rows)][:, layers])


def naive_by_sample(records: list[RoutedExperts], layers: slice) -> np.ndarray:
    pieces = []
    for record in records:
        wide = widen_sample(record)
        pieces += [wide[piece, layers] for piece in own_positions(len(wide))]
    return np.concatenate(pieces)


def make_batch(records: list[RoutedExperts], tokens: list[np.ndarray], stages: int) -> MicroBatch:
    plan = ParallelPlan(context_parallel_size=CONTEXT_PARALLEL, pipeline_parallel_size=stages)
    sequences = PackedSequences.pack([len(one) for one in tokens], plan)
    return MicroBatch(
        layout=RowLayout(plan=plan, sequences=sequences), records=records, token_ids=tokens
    )


def cases(
    records: list[RoutedExperts], tokens: list[np.ndarray], stages: int
) -> tuple[dict[str, Case], RankRows]:
    batch = make_batch(records, tokens, stages)
    rank = ParallelRank(cp_rank=CONTEXT_RANK, pp_rank=stages - 1)
    layers = batch.layers_for(rank)
    wide, narrow = batch.rows_for(rank), batch.rows_for(rank, widen=False)
    assert np.array_equal(wide.ids_TLK, naive(records, layers))
    assert np.array_equal(wide.ids_TLK, naive_by_sample(records, layers))
    assert np.array_equal(wide.ids_TLK[wide.valid_T], narrow.ids_TLK[wide.valid_T])
    out, small, source = wide.ids_TLK, narrow.ids_TLK, narrow.ids_TLK.copy()
    return {
        "naive": lambda: naive(records, layers),
        "naive, by sample": lambda: naive_by_sample(records, layers),
        "rows_for": lambda: batch.rows_for(rank, out=out),
        "rows_for, fresh": lambda: batch.rows_for(rank),
        "rows_for, narrow": lambda: batch.rows_for(rank, widen=False, out=small),
        "check": lambda: make_batch(records, tokens, stages),
        "fill": lambda: ctypes.memset(out.ctypes.data, 1, out.nbytes),
        "copy": lambda: ctypes.memmove(small.ctypes.data, source.ctypes.data, small.nbytes),
    }, wide


def cpu_seconds(work: Case) -> float:
    begin = time.process_time_ns()
    work()
    return (time.process_time_ns() - begin) / 1e9


def measure(made: dict[str, Case]) -> dict[str, dict[str, float]]:
    rounds = [{name: cpu_seconds(case) for name, case in made.items()} for _ in range(ROUNDS)]
    return {name: spread([one[name] for one in rounds]) for name in made}


def ratios(seconds: dict[str, dict[str, float]]) -> dict[str, float]:
    median = {name: value["median"] for name, value in seconds.items()}
    return {
        "times faster than naive": median["naive"] / median["rows_for"],
        "times faster than naive by sample": median["naive, by sample"] / median["rows_for"],
        "share of the fill limit": median["fill"] / median["rows_for"],
        "narrow, share of the copy limit": median["copy"] / median["rows_for, narrow"],
    }


def main() -> None:
    records, tokens = make_samples()
    result: dict[str, Any] = {
        **describe_run(("numpy",)),
        "tokens": sum(len(one) for one in tokens),
        "context_parallel_size": CONTEXT_PARALLEL,
    }
    for name, stages in PIPELINE_STAGES.items():
        made, rows = cases(records, tokens, stages)
        seconds = measure(made)
        result[name] = {
            "rows": len(rows.ids_TLK),
            "int64_bytes": rows.ids_TLK.nbytes,
            "cpu_seconds": seconds,
            "ratios": ratios(seconds),
        }
        print(f"{name}: {len(rows.ids_TLK)} rows, {rows.ids_TLK.nbytes / 1e6:.0f} MB")
        for case, value in seconds.items():
            print(f"  {case:36} {value['median'] * 1e3:9.2f} ms")
        for what, value in result[name]["ratios"].items():
            print(f"  {what:36} {value:9.2f}")
    print(write_result("ingest_speed", result))


if __name__ == "__main__":
    main()
