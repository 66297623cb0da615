"""What each of two processes of the distributed test runs; it writes what it saw to a file.

Usage: torchrun --nproc-per-node 2 -m tests.replay.trl.distributed_run FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import torch

from routebook import LLM
from routebook.routes import RoutedExperts
from tests.replay.rank import end_rank
from tests.replay.trl.runs import (
    SCHEMA,
    EngineRollouts,
    foreign_rows,
    logged,
    make,
    sorted_rows,
    watched,
)


class Remembering(EngineRollouts):
    """Gives rows that no router chose, and keeps them."""

    def __init__(self) -> None:
        super().__init__(LLM("tiny", dtype="float32"))
        self.given: list[tuple[list[int], Any]] = []

    def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        pairs = zip(output["prompt_ids"], output["completion_ids"], strict=True)
        tokens = [[*a, *b] for a, b in pairs]
        generator = np.random.default_rng((trainer.accelerator.process_index, len(self.given)))
        output["routed_experts"] = [
            RoutedExperts.from_rows(
                SCHEMA,
                foreign_rows(len(ids) - 1, generator),
                ids,
                version_T=output["weight_version"],
            )
            for ids in tokens
        ]
        self.given += zip(tokens, output["routed_experts"], strict=True)
        return output


def is_right(sequence: list[int], rows: np.ndarray, given: list[tuple[list[int], Any]]) -> bool:
    records = [record for tokens, record in given if tokens == sequence]
    return any(np.array_equal(rows, sorted_rows(record, len(rows))) for record in records)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    rollouts = Remembering()
    args = {"per_device_train_batch_size": 2, "num_generations": 8, "steps_per_generation": 2}
    trainer = make(folder, rollouts, max_steps=4, gradient_checkpointing=True, **args)
    with watched(trainer.model) as passes:
        trainer.train()
    sequences = [pair for one in passes for pair in one.sequences()]
    report = {
        "rank": trainer.accelerator.process_index,
        "is_split": type(trainer.model_wrapped).__name__,
        "right": [is_right(*pair, rollouts.given) for pair in sequences],
        "tokens": [tokens for tokens, _ in rollouts.given],
        "gaps": logged(trainer, "replay/gap/max"),
        "shares": logged(trainer, "replay/sequences"),
        "versions": logged(trainer, "replay/weight_version"),
    }
    (folder / f"rank{report['rank']}.json").write_text(json.dumps(report))
    end_rank()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
