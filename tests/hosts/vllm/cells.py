"""One cell of the matrix: an engine, a workload, and what was compared, as a line of JSON.

Run as `python -m tests.hosts.vllm.cells NAME SCRATCH` in an environment that has vLLM: an engine to a process, since
vLLM's distributed state is the process's.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_COMMON = (
    *("plain", "chunked", "prefix_hits", "completions_hit", "samples", "declined"),
    *("preemption", "stop_strings", "forced_reset"),
)


@dataclass(frozen=True)
class Cell:
    """How an engine is started, and what it is asked."""

    title: str
    options: Mapping[str, Any] = field(default_factory=dict)
    workload: tuple[str, ...] = _COMMON
    model: str = "tiny"
    asynchronous: bool = False
    at_least: Mapping[str, int] = field(default_factory=lambda: {"preempted": 1, "hit_tokens": 1})


_NO_CACHE = ("plain", "chunked", "samples", "preemption", "stop_strings")
CELLS = {
    "sync": Cell("one step at a time"),
    "async": Cell("asynchronous scheduling", asynchronous=True),
    "reload": Cell("weights loaded again", workload=("plain", "reloaded"), at_least={"reloads": 2}),
    "no-caching": Cell(
        "prefix caching off",
        {"enable_prefix_caching": False},
        _NO_CACHE,
        at_least={"preempted": 1, "stopped": 2},
    ),
    "dense-first": Cell(
        "first layer dense, 300 experts",
        {"skip_tokenizer_init": True},
        ("plain", "chunked", "prefix_hits", "samples", "preemption"),
        model="dense-first",
    ),
    "ngram": Cell(
        "n-gram speculation",
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 4,
                "prompt_lookup_min": 1,
            }
        },
        (*_COMMON, "repetitive"),
        at_least={"accepted": 20, "rejected": 20, "preempted": 1},
    ),
    "compiled": Cell("torch.compile", {"enforce_eager": False}),
    "tp2": Cell("tensor parallel 2", {"tensor_parallel_size": 2}),
    "pp2": Cell("pipeline parallel 2", {"pipeline_parallel_size": 2}),
}


def run(name: str, scratch: Path) -> dict[str, Any]:
    """Run a cell and tell what was compared."""
    cell = CELLS[name]
    # The scheduler in this process, where it can be watched; no core is this engine's own.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from routebook.hosts.vllm import LLM
    from tests.hosts.vllm import asynchronous, observed
    from tests.hosts.vllm.models import folder_of
    from tests.hosts.vllm.oracle import Oracle, Tally
    from tests.hosts.vllm.workload import ALL, Workload

    if cell.asynchronous:
        asynchronous.force()
    folder = folder_of(cell.model, scratch)
    tally = Tally(Oracle(folder))
    llm = LLM(folder, **(OPTIONS | dict(cell.options)))
    with observed.scheduler(llm.llm_engine.engine_core.engine_core.scheduler, tally):
        work = Workload(llm, tally)
        for part in cell.workload:
            ALL[part](work)
    return {
        "cell": name,
        "pairs": tally.pairs,
        "different": tally.different,
        "shifted": tally.shifted,
        **tally.facts,
    }


OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 320,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "block_size": 32,
    "num_gpu_blocks_override": 16,
    "kv_cache_memory_bytes": 2**26,
    "disable_log_stats": True,
}

if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], Path(sys.argv[2]))), flush=True)
