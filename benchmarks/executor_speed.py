"""What does a worker in a process of its own cost, in tokens per second and in bytes beside the rows?

    python -m benchmarks.executor_speed

A random model with the routing shape of Qwen3-30B-A3B (48 MoE layers, 8 of 128 experts), and with a hidden size and a
vocabulary so small that a step is short: messages weigh more than they would beside a real model. 32 requests decode
with rows in each way; the ways take turns of some steps at equal context lengths, so a machine whose speed drifts slows
all of them. A turn ends when its last step has been taken, so nothing of it runs in the next one's time.

Wall time is what a user waits. CPU time is that of all threads, of the engine and of the worker's process together.
Bytes are counted by the kernel, as payload of the TCP connection in both directions, acknowledged and received.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.utils import logging

from benchmarks.results import describe_run, spread, write_result
from routebook.engine.engine import PauseMode
from routebook.engine.llm import LLM
from routebook.engine.process_executor import ProcessExecutor
from routebook.engine.sampling_params import SamplingParams

REQUESTS, PROMPT, TURN = 32, 32, 16
ROW_NBYTES = 48 * 8
WAYS = {
    "inline": ("inline", 1),
    "process": ("process", 1),
    "inline, depth 2": ("inline", 2),
    "thread, depth 2": ("thread", 2),
    "process, depth 2": ("process", 2),
}
"""Name of a way -> executor and steps in flight."""
COSTS = {"process": "inline", "process, depth 2": "inline, depth 2"}
"""What is compared: a way -> the one that it is measured against."""
_COUNTERS = (slice(120, 128), slice(128, 136))
"""Where Linux's `struct tcp_info` has `tcpi_bytes_acked` and `tcpi_bytes_received`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--name", default="executor_speed", help="of the file of results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        result = describe_run(("torch", "transformers", "numpy", "pyzmq", "msgspec"))
        result |= measure(folder, arguments.rounds)
    print(result["says"])
    print(f"wrote {write_result(arguments.name, result)}")


def save_model(folder: str) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        moe_intermediate_size=16,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


@dataclass
class Way:
    """One engine in the middle of decoding, and what its turns took."""

    llm: LLM
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    nbytes: list[float] = field(default_factory=list)

    def start(self, rounds: int) -> None:
        """Queue the requests and compute the prompts."""
        params = SamplingParams(temperature=0, max_tokens=num_tokens(rounds), ignore_eos=True)
        draw = random.Random(0)
        for _ in range(REQUESTS):
            self.llm.engine.add_request([draw.randrange(1000) for _ in range(PROMPT)], params)
        self.take_turn()
        self.take_turn()
        for values in (self.wall, self.cpu, self.nbytes):
            values.clear()

    def take_turn(self) -> None:
        """Run some steps, and note seconds and bytes per step."""
        engine = self.llm.engine
        before = (time.perf_counter(), self._cpu_seconds(), self._bytes())
        # The first call plans as many steps as may be in flight, each other one a step.
        for _ in range(TURN + 1 - engine.config.scheduler.max_steps_in_flight):
            engine.step()
        # Takes what is under way, and plans nothing.
        engine.pause(PauseMode.KEEP)
        after = (time.perf_counter(), self._cpu_seconds(), self._bytes())
        engine.resume()
        for values, begin, end in zip(
            (self.wall, self.cpu, self.nbytes), before, after, strict=True
        ):
            values.append((end - begin) / TURN)

    def _pid(self) -> int | None:
        executor = self.llm.engine.executor
        return executor.pid if isinstance(executor, ProcessExecutor) else None

    def _cpu_seconds(self) -> float:
        """Of all threads of this process, and of the worker's."""
        return time.process_time() + (0.0 if (pid := self._pid()) is None else process_time_of(pid))

    def _bytes(self) -> int:
        executor = self.llm.engine.executor
        if not isinstance(executor, ProcessExecutor):
            return 0
        assert executor._child is not None
        return payload_nbytes(executor._child._socket.LAST_ENDPOINT.decode())


def process_time_of(pid: int) -> float:
    """CPU seconds of all threads of another process, as `clock_getcpuclockid` names its clock."""
    return time.clock_gettime((~pid << 3) | 2)


def payload_nbytes(endpoint: str) -> int:
    """Bytes of the connections to an address that this process serves, in both directions."""
    port, total = int(endpoint.rpartition(":")[2]), 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(entry).startswith("socket:"):
                total += _payload_nbytes(int(entry.name), port)
    return total


def _payload_nbytes(fd: int, port: int) -> int:
    with socket.socket(fileno=os.dup(fd)) as connection:
        # A socket that listens has no peer.
        connection.getpeername()
        if connection.family != socket.AF_INET or connection.getsockname()[1] != port:
            return 0
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
    return sum(int.from_bytes(info[place], "little") for place in _COUNTERS)


def measure(folder: str, rounds: int) -> dict[str, Any]:
    """All ways side by side."""
    ways = {name: Way(make_llm(folder, num_tokens(rounds), *how)) for name, how in WAYS.items()}
    for way in ways.values():
        way.start(rounds)
    for number in range(rounds):
        names = list(ways)
        for name in names if number % 2 else reversed(names):
            ways[name].take_turn()
    for way in ways.values():
        way.llm.shutdown()
    return summary(ways)


def num_tokens(rounds: int) -> int:
    """Tokens of a completion that does not end before the last turn: of the rounds, and of two turns before them."""
    return (rounds + 3) * TURN


def make_llm(folder: str, max_tokens: int, executor: str, steps_in_flight: int) -> LLM:
    return LLM(
        folder,
        device="cpu",
        executor=executor,
        max_steps_in_flight=steps_in_flight,
        max_num_seqs=REQUESTS,
        max_model_len=PROMPT + max_tokens,
        prefix_caching=False,
    )


def summary(ways: dict[str, Way]) -> dict[str, Any]:
    """Figures of each way, and ratios within the same round."""
    costs = {
        f"{name} over {base}": {
            "wall": spread(ratios(ways[name].wall, ways[base].wall)),
            "cpu": spread(ratios(ways[name].cpu, ways[base].cpu)),
        }
        for name, base in COSTS.items()
    }
    rows = REQUESTS * ROW_NBYTES
    nbytes = median(ways["process"].nbytes)
    wall, cpu = (costs["process over inline"][kind]["median"] - 1 for kind in ("wall", "cpu"))
    deep = costs["process, depth 2 over inline, depth 2"]["wall"]["median"] - 1
    return {
        "requests": REQUESTS,
        "steps_per_turn": TURN,
        "rounds": len(ways["process"].wall),
        "ways": {name: figures(way) for name, way in ways.items()},
        "seconds_per_step_ratio": costs,
        "rows_nbytes_per_step": rows,
        "message_nbytes_per_step": nbytes,
        "says": (
            f"a worker in a process costs {wall:.1%} of the wall time and {cpu:.1%} of the CPU time of a step;"
            f" with two steps in flight {deep:.1%} of the wall time. Its messages have {nbytes / rows - 1:.2%}"
            f" more bytes than the rows"
        ),
    }


def ratios(values: list[float], bases: list[float]) -> list[float]:
    return [value / base for value, base in zip(values, bases, strict=True)]


def figures(way: Way) -> dict[str, Any]:
    return {
        "tokens_per_second": spread([REQUESTS / seconds for seconds in way.wall]),
        "wall_seconds_per_step": spread(way.wall),
        "cpu_seconds_per_step": spread(way.cpu),
    }


if __name__ == "__main__":
    main()
