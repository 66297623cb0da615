"""Does capture cost anything, and is the engine as fast as transformers' own `generate`?

One run interleaves, round by round: the engine without rows, the engine with rows, `generate`. All decode a batch of
32 prompts of 32 tokens for 128 tokens, greedily, with the bundled model in float32. Ratios are of the same round, so
that a busy machine slows both sides of a ratio. On the CPU it is CPU time of one thread, on CUDA wall time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.results import describe_run, spread, write_result
from routebook.engine.llm import LLM
from routebook.engine.sampling_params import SamplingParams
from routebook.models import bundled_model_path

BATCH, PROMPT, COMPLETION = 32, 32, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    path = str(bundled_model_path("tiny"))
    device = torch.device(arguments.device)
    llm = LLM(path, dtype="float32", device=device.type, prefix_caching=False, max_num_seqs=BATCH)
    peer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
    prompts = torch.randint(
        5, peer.config.vocab_size, (BATCH, PROMPT), generator=torch.Generator().manual_seed(0)
    )
    ways: dict[str, Callable[[], None]] = {
        "rows_off": lambda: run_engine(llm, prompts, rows=False),
        "rows_on": lambda: run_engine(llm, prompts, rows=True),
        "generate": lambda: run_generate(peer, prompts.to(device)),
    }
    clock = process_time if device.type == "cpu" else synchronized_time
    seconds = measure(ways, arguments.rounds, clock)
    result = describe_run(("torch", "transformers", "numpy")) | summary(seconds)
    result["device"] = device.type if device.type == "cpu" else torch.cuda.get_device_name()
    print(result["says"])
    print(f"wrote {write_result(f'engine_speed_{device.type}', result)}")


def measure(
    ways: dict[str, Callable[[], None]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of every way in every round; the order turns, and one round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for index in range(rounds + 1):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            start = clock()
            ways[name]()
            if index:
                seconds[name].append(clock() - start)
    return seconds


def synchronized_time() -> float:
    """Wall time once the device has done what it was given."""
    torch.cuda.synchronize()
    return perf_counter()


def run_engine(llm: LLM, prompts: torch.Tensor, *, rows: bool) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=COMPLETION, ignore_eos=True, routed_experts=rows
    )
    outputs = llm.generate(prompts.tolist(), params)
    assert all(len(output.choices[0].token_ids) == COMPLETION for output in outputs)


@torch.inference_mode()
def run_generate(peer: Any, prompts: torch.Tensor) -> None:
    output = peer.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        min_new_tokens=COMPLETION,
        max_new_tokens=COMPLETION,
    )
    assert output.shape == (BATCH, PROMPT + COMPLETION)


def summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Ratios: of the same round with their spread, and of the best times of all rounds."""
    pairs = list(zip(seconds["rows_on"], seconds["rows_off"], strict=True))
    peers = list(zip(seconds["generate"], seconds["rows_on"], strict=True))
    cost = spread([on / off - 1 for on, off in pairs])
    peer = spread([generate / on for generate, on in peers])
    best = {name: min(values) for name, values in seconds.items()}
    cost["of_best"] = best["rows_on"] / best["rows_off"] - 1
    peer["of_best"] = best["generate"] / best["rows_on"]
    return {
        "batch": BATCH,
        "prompt_tokens": PROMPT,
        "completion_tokens": COMPLETION,
        "rounds": len(pairs),
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "capture_cost": cost,
        "speed_over_generate": peer,
        "says": (
            f"capture costs {cost['median']:.1%} (rounds {cost['min']:.1%} to {cost['max']:.1%}, best times"
            f" {cost['of_best']:.1%}); with rows, {peer['median']:.2f} x the speed of generate (rounds"
            f" {peer['min']:.2f} to {peer['max']:.2f}, best times {peer['of_best']:.2f})"
        ),
    }


if __name__ == "__main__":
    main()
