"""Rows of plain transformers over prompt and completion, in float32, to compare vLLM's rows with.

vLLM's kernels for CPUs do not sort what they choose, so choices are compared as sets.

Legend of shape suffixes: T = rows, H = hidden layers, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.capture.recorder import ExpertsRecorder


class Oracle:
    """A model of transformers, and the layers of it that have experts."""

    def __init__(self, folder: str) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.set_attn_implementation("eager")
        model.set_experts_implementation("eager")
        self._model = model.eval()
        self.num_hidden_layers = model.config.num_hidden_layers
        self.layer_ids = [
            index for index, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")
        ]

    @torch.inference_mode()
    def rows(self, token_ids: Sequence[int]) -> np.ndarray:
        """Ids `[T, L, K]`, one row per token but the last."""
        recorder = ExpertsRecorder()
        with recorder.recording(self._model):
            self._model(input_ids=torch.tensor([list(token_ids[:-1])]), use_cache=False)
        return recorder.rows.numpy()


@dataclass
class Tally:
    """What was compared."""

    oracle: Oracle
    pairs: int = 0
    """(token, layer) pairs."""
    different: int = 0
    shifted: int = 0
    """Pairs that are equal although the rows were moved by one: a control, far below `pairs`."""
    facts: dict[str, int] = field(default_factory=dict)

    def compare(self, prompt: Sequence[int], completion: Any, start: int = 0) -> None:
        """Compare a finished completion of vLLM, whose rows must be complete."""
        token_ids = [*prompt, *completion.token_ids]
        rows_THK = completion.routed_experts
        assert rows_THK is not None, "no rows"
        expected_TLK = self.oracle.rows(token_ids)[start:]
        shape = (len(token_ids) - 1 - start, self.oracle.num_hidden_layers)
        assert rows_THK.shape[:2] == shape, (rows_THK.shape, shape)
        dense = sorted(set(range(shape[1])) - set(self.oracle.layer_ids))
        assert not rows_THK[:, dense].any(), "a dense layer has ids"
        rows_TLK = rows_THK[:, self.oracle.layer_ids]
        equal_TL = _equal(rows_TLK, expected_TLK)
        self.pairs += equal_TL.size
        self.different += int((~equal_TL).sum())
        self.shifted += int(_equal(rows_TLK[1:], expected_TLK[:-1]).sum())

    def count(self, **facts: int) -> None:
        """Add to facts that a cell must show, as that a request was preempted at all."""
        for name, number in facts.items():
            self.facts[name] = self.facts.get(name, 0) + number


def _equal(a_TLK: np.ndarray, b_TLK: np.ndarray) -> np.ndarray:
    return (np.sort(a_TLK, axis=-1) == np.sort(b_TLK, axis=-1)).all(axis=-1)
