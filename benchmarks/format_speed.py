"""What it costs to write and read a response with routed experts, beside the way that trainers' servers have today.

    python -m benchmarks.format_speed

The shape is that of Qwen3-30B-A3B: 48 layers, top 8 of 128; an answer has 4096 rows. The baseline is `np.save`,
base64 and json of Python's own library, one after the other; for a consumer, the same backwards. Times are CPU
seconds of this process, on one thread: on a busy machine being descheduled costs nothing. Each round visits every
case once; the median over the rounds counts, and ratios are taken within the run.

SGLang's form is four times as wide; it is compared with the plain way of writing the same.

The second part asks how long one step of the encoder keeps other threads of the interpreter out. A second thread
asks for its turn all the time, and the CPU seconds between two turns of its own are what it had to wait. The
operating system can only make that longer, so the least of the rounds' longest waits counts. It is the pieces that
are measured: giving back the memory of a joined text of 67 MB alone takes 2 ms.

Prints a table, writes `results/format_speed.json`.
"""

from __future__ import annotations

import base64
import io
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from benchmarks.results import describe_run, write_result
from routebook.routes import RoutedExperts, RouteSchema, decode_frame, encode_frame
from routebook.routes.formats import FORMATS

SCHEMA = RouteSchema(layer_ids=tuple(range(48)), num_experts=128, top_k=8, num_hidden_layers=48)
SPARSE = RouteSchema(layer_ids=tuple(range(1, 48)), num_experts=128, top_k=8, num_hidden_layers=48)
ROWS = 4096
LONG_ROWS = 32768
ROUNDS = 21
HOLD_ROUNDS = 25

Case = Callable[[], object]


def make_record(schema: RouteSchema, num_rows: int) -> tuple[RoutedExperts, np.ndarray]:
    rng = np.random.default_rng(num_rows)
    order = rng.random((64, schema.num_layers, schema.num_experts)).argsort(axis=2)
    ids = np.tile(order[:, :, : schema.top_k].astype(schema.dtype), (num_rows // 64, 1, 1))
    tokens = rng.integers(0, 150_000, num_rows + 1).astype(np.int32)
    return RoutedExperts.from_rows(schema, ids, tokens), tokens


def body(value: Any) -> dict[str, Any]:
    """A response around the value of its routed experts."""
    choice = {"index": 0, "token_ids": list(range(64)), "routed_experts": value}
    return {"request_id": "generate-tokens-0", "choices": [choice]}


def write_raw_plainly(ids: np.ndarray) -> bytes:
    return json.dumps(body(base64.b64encode(ids.astype(np.int32).tobytes()).decode())).encode()


def read_raw_plainly(data: bytes) -> np.ndarray:
    text = json.loads(data)["choices"][0]["routed_experts"]
    return np.frombuffer(base64.b64decode(text), np.int32).reshape(-1, 48, 8)


def write_plainly(ids: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, ids)
    return json.dumps(body(base64.b64encode(file.getvalue()).decode())).encode()


def read_plainly(data: bytes) -> np.ndarray:
    text = json.loads(data)["choices"][0]["routed_experts"]
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def write(name: str, record: RoutedExperts) -> bytes:
    return msgspec.json.encode(body(msgspec.Raw(FORMATS[name].encode_json(record))))


def read(name: str, data: bytes, record: RoutedExperts, tokens: np.ndarray) -> RoutedExperts:
    value = msgspec.json.decode(data)["choices"][0]["routed_experts"]
    return FORMATS[name].decode(value, record.schema, tokens)


def cases() -> dict[str, Case]:
    record, tokens = make_record(SCHEMA, ROWS)
    sparse, sparse_tokens = make_record(SPARSE, ROWS)
    plain = write_plainly(record.ids_TLK)
    raw = write_raw_plainly(record.ids_TLK)
    frame = encode_frame(record, checksum=True)
    made: dict[str, Case] = {
        "write, plainly": lambda: write_plainly(record.ids_TLK),
        "read, plainly": lambda: read_plainly(plain),
        "write sglang, plainly": lambda: write_raw_plainly(record.ids_TLK),
        "read sglang, plainly": lambda: read_raw_plainly(raw),
        "write frame without JSON": lambda: encode_frame(record, checksum=True),
        "read frame without JSON": lambda: decode_frame(frame),
        "write vllm, first layer dense": lambda: write("vllm", sparse),
    }
    for name in FORMATS:
        data = write(name, record)
        made[f"write {name}"] = lambda name=name: write(name, record)  # type: ignore[misc]
        made[f"read {name}"] = lambda name=name, data=data: read(name, data, record, tokens)  # type: ignore[misc]
    assert len(sparse_tokens) == ROWS + 1
    return made


def cpu_seconds(work: Case) -> float:
    begin = time.process_time_ns()
    work()
    return (time.process_time_ns() - begin) / 1e9


def measure(made: dict[str, Case]) -> dict[str, float]:
    samples: dict[str, list[float]] = {name: [] for name in made}
    rng = np.random.default_rng(0)
    for _ in range(ROUNDS):
        # What a case leaves in caches and heap is met by another one in the next round.
        for name in rng.permutation(list(made)).tolist():
            samples[name].append(cpu_seconds(made[name]))
    return {name: statistics.median(samples[name]) for name in made}


class Waiting(threading.Thread):
    """Asks for its turn all the time and notes the longest wait for it, in CPU seconds of the process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest = 0.0
        self.done = False

    def run(self) -> None:
        while not self.done:
            begin = time.process_time_ns()
            time.sleep(0)
            self.longest = max(self.longest, (time.process_time_ns() - begin) / 1e9)


def longest_hold(work: Case) -> float:
    """CPU seconds that one step of the work keeps another thread waiting."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    waiting = Waiting()
    try:
        waiting.start()
        work()
        waiting.done = True
        waiting.join()
    finally:
        sys.setswitchinterval(interval)
    return waiting.longest


def measure_holds() -> dict[str, float]:
    record, _ = make_record(SCHEMA, LONG_ROWS)
    works: dict[str, Case] = {
        f"write {name}": lambda fmt=fmt: fmt.json_parts(record)  # type: ignore[misc]
        for name, fmt in FORMATS.items()
    }
    works["write, plainly"] = lambda: write_plainly(record.ids_TLK)
    rounds = [
        {name: longest_hold(work) for name, work in works.items()} for _ in range(HOLD_ROUNDS)
    ]
    return {name: min(one[name] for one in rounds) for name in works}


def baseline(name: str) -> str:
    verb, _, what = name.partition(" ")
    return f"{verb.rstrip(',')}{' sglang' if 'sglang' in what else ''}, plainly"


def main() -> None:
    seconds = measure(cases())
    ratios = {name: value / seconds[baseline(name)] for name, value in seconds.items()}
    holds = measure_holds()
    for name, value in seconds.items():
        print(f"{name:32} {value * 1e3:8.3f} ms  {ratios[name]:6.3f} of the plain way")
    for name, value in holds.items():
        print(f"{name:32} {value * 1e3:8.3f} ms longest hold at {LONG_ROWS} rows")
    result = {
        **describe_run(("numpy", "msgspec", "pybase64")),
        "rows": ROWS,
        "cpu_seconds": seconds,
        "ratio_to_plain": ratios,
        "long_rows": LONG_ROWS,
        "longest_hold_cpu_seconds": holds,
    }
    print(write_result("format_speed", result))


if __name__ == "__main__":
    main()
