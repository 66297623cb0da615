"""An engine that cannot have rows, and what it says. Prints one line of JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from routebook.errors import RoutebookError
from routebook.models import bundled_model_path
from tests.hosts.vllm.cells import OPTIONS


def start(folder: str | None = None, **options: Any) -> None:
    """Start an engine, and let it run a step."""
    from vllm import SamplingParams

    from routebook.hosts.vllm import LLM

    llm = LLM(folder or str(bundled_model_path("tiny")), **(OPTIONS | options))
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=2), use_tqdm=False)


def dense() -> None:
    """A model without a router."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
    )
    with tempfile.TemporaryDirectory() as folder:
        Qwen3ForCausalLM(config).save_pretrained(folder)
        start(folder, skip_tokenizer_init=True)


def another_release() -> None:
    """A vLLM that nobody looked at."""
    from routebook.hosts.vllm import worker

    worker.installed_version = lambda: "0.1.2"
    start()


def lost_hook() -> None:
    """Routers that were bound and do not write, as in a graph that was compiled before."""
    from routebook.hosts.vllm.step_buffer import StepBuffer

    writer = StepBuffer.writer
    StepBuffer.writer = lambda self, index: (
        (lambda ids: None) if index == 3 else writer(self, index)
    )
    start()


CASES: dict[str, Callable[[], None]] = {
    "native": lambda: start(enable_return_routed_experts=True),
    "dense": dense,
    "expert-parallel": lambda: start(enable_expert_parallel=True),
    "worker": lambda: start(worker_cls="vllm.v1.worker.cpu_worker.CPUWorker"),
    "unknown-option": lambda: start(additional_config={"routebook": {"colour": "red"}}),
    "release": another_release,
    "lost-hook": lost_hook,
}

if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        CASES[sys.argv[1]]()
    except RoutebookError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        sys.exit(0)
    print(json.dumps({"error": "none"}), flush=True)
