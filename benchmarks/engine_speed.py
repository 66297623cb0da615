"""Does capture cost anything, and does the engine decode as fast as transformers' own `generate`?

Three decode the same batch side by side, a few steps of each in turn: `generate`, the engine with rows, and the engine
without. A machine whose speed drifts slows all three alike, which whole runs one after the other would not show; and
turns of a few steps leave each its warm caches, which single steps would not. The bundled model in float32, 32 prompts
of 32 tokens, 128 tokens each, greedy. The prompts' own step is not counted, the making of the records at the end is. On
the CPU it is CPU time of one thread, on CUDA wall time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from benchmarks.results import describe_run, spread, write_result
from routebook.engine.llm import LLM
from routebook.engine.sampling_params import SamplingParams
from routebook.models import bundled_model_path

BATCH, PROMPT, COMPLETION = 32, 32, 128
TURN = 16
WAYS = ("generate", "rows_on", "rows_off")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    rounds = measure(device, arguments.rounds)
    result = describe_run(("torch", "transformers", "numpy")) | summary(rounds)
    result["device"] = device.type if device.type == "cpu" else torch.cuda.get_device_name()
    print(result["says"])
    print(f"wrote {write_result(f'engine_speed_{device.type}', result)}")


def measure(device: torch.device, rounds: int) -> list[dict[str, float]]:
    """Seconds per decode step of each way, one entry per round; one round before them warms up."""
    path = str(bundled_model_path("tiny"))
    options: dict[str, Any] = {"dtype": "float32", "device": device.type, "max_num_seqs": BATCH}
    engines = {name: LLM(path, prefix_caching=False, **options) for name in ("rows_on", "rows_off")}
    peer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, peer.config.vocab_size, (BATCH, PROMPT), generator=generator)
    clock = process_time if device.type == "cpu" else synchronized_time
    results = [one_round(peer, engines, prompts.to(device), clock) for _ in range(rounds + 1)]
    return results[1:]


def synchronized_time() -> float:
    """Wall time once the device has done what it was given."""
    torch.cuda.synchronize()
    return perf_counter()


class SideBySide(BaseStreamer):
    """Called by `generate` after each of its steps: notes how long it took, and lets the engines follow."""

    def __init__(self, engines: dict[str, LLM], clock: Callable[[], float]) -> None:
        self.seconds: dict[str, list[float]] = {name: [] for name in WAYS}
        self._engines = engines
        self._clock = clock
        self._last = clock()

    def put(self, value: torch.Tensor) -> None:
        """The first call brings the prompts, each later one a token for every sequence."""
        self.seconds["generate"].append(self._clock() - self._last)
        num_calls = len(self.seconds["generate"])
        if num_calls % TURN == 0 or num_calls > COMPLETION:
            names = list(self._engines)
            for name in names if num_calls // TURN % 2 else reversed(names):
                self._take_turn(name, num_calls)
        self._last = self._clock()

    def _take_turn(self, name: str, num_steps: int) -> None:
        """Let an engine catch up."""
        engine = self._engines[name].engine
        while len(self.seconds[name]) < num_steps and engine.has_work:
            begin = self._clock()
            engine.step()
            self.seconds[name].append(self._clock() - begin)

    def end(self) -> None:
        """`generate` has nothing more to say."""


@torch.inference_mode()
def one_round(
    peer: Any, engines: dict[str, LLM], prompts: torch.Tensor, clock: Callable[[], float]
) -> dict[str, float]:
    """Mean seconds of a decode step of each way."""
    for name, llm in engines.items():
        params = SamplingParams(
            temperature=0,
            max_tokens=COMPLETION,
            ignore_eos=True,
            routed_experts=name == "rows_on",
        )
        for prompt in prompts.tolist():
            llm.engine.add_request(prompt, params)
    side_by_side = SideBySide(engines, clock)
    peer.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        min_new_tokens=COMPLETION,
        max_new_tokens=COMPLETION,
        streamer=side_by_side,
    )
    assert not any(llm.engine.has_work for llm in engines.values())
    # generate: the prompts' call, the prompts' step, then decodes; engines: the prompts' step, then decodes.
    decodes = {
        name: values[2:] if name == "generate" else values[1:COMPLETION]
        for name, values in side_by_side.seconds.items()
    }
    assert {len(values) for values in decodes.values()} == {COMPLETION - 1}
    return {name: sum(values) / len(values) for name, values in decodes.items()}


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Ratios of the same round, with their spread."""
    cost = spread([r["rows_on"] / r["rows_off"] - 1 for r in rounds])
    peer = spread([r["generate"] / r["rows_on"] for r in rounds])
    return {
        "batch": BATCH,
        "prompt_tokens": PROMPT,
        "completion_tokens": COMPLETION,
        "rounds": len(rounds),
        "seconds_per_step": {name: spread([r[name] for r in rounds]) for name in WAYS},
        "capture_cost": cost,
        "speed_over_generate": peer,
        "says": (
            f"capture costs {cost['median']:.1%} of a decode step (rounds {cost['min']:.1%} to"
            f" {cost['max']:.1%}); with rows, {peer['median']:.2f} x the speed of generate (rounds"
            f" {peer['min']:.2f} to {peer['max']:.2f})"
        ),
    }


if __name__ == "__main__":
    main()
