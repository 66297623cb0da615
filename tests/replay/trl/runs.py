"""Short GRPO runs on the bundled model, and an independent look at what ran in them.

Legend of shape suffixes: B = batch, S = padded length, N = B * S, L = MoE layers, K = top-k.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from routebook.models import bundled_model_path
from routebook.routes import RoutedExperts, RouteSchema

trl = pytest.importorskip("trl")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
from datasets import Dataset  # noqa: E402

from routebook.replay.trl import (  # noqa: E402
    EngineRollouts,
    R3GRPOTrainer,
    ReplayConfig,
    RouteBook,
    ServerRollouts,
)

__all__ = [
    "Dataset",
    "EngineRollouts",
    "R3GRPOTrainer",
    "ReplayConfig",
    "RouteBook",
    "ServerRollouts",
]

TINY = str(bundled_model_path("tiny"))
SCHEMA = RouteSchema(layer_ids=tuple(range(6)), num_experts=16, top_k=4, num_hidden_layers=6)
EOS = 0
PROSE = [
    "It is a truth universally acknowledged, that a",
    "Call me Ishmael. Some years ago",
    "To be, or not to be, that",
    "And the whale",
]


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A sum over the tokens' ids: differs between completions, so that there is something to learn."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


def options(folder: Path, **args: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_generations": 4,
        "gradient_accumulation_steps": 1,
        "max_completion_length": 8,
        "max_steps": 2,
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "model_init_kwargs": {"dtype": "float32"},
        **args,
    }


def make(folder: Path, rollout_func: Any, replay: Any = None, **args: Any) -> Any:
    """A trainer of the bundled model in float32."""
    kind = args.pop("kind", R3GRPOTrainer)
    more = {name: args.pop(name) for name in ("eval_dataset", "model") if name in args}
    return kind(
        **{"model": TINY, **more},
        reward_funcs=reward,
        args=trl.GRPOConfig(**options(folder, **args)),
        train_dataset=Dataset.from_dict({"prompt": PROSE * 4}),
        rollout_func=rollout_func,
        replay=replay,
    )


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def foreign_rows(num_rows: int, generator: np.random.Generator) -> np.ndarray:
    """Rows that no router chose, uint8 `[rows, L, K]`."""
    scores = generator.random((num_rows, SCHEMA.num_layers, SCHEMA.num_experts))
    return np.argsort(scores, -1)[..., : SCHEMA.top_k].astype(SCHEMA.dtype)


class Scripted:
    """A rollout function that draws random tokens and random rows, and remembers them."""

    def __init__(self, *, same_tokens: bool = False, with_end: bool = True) -> None:
        self.generations: list[list[tuple[list[int], RoutedExperts]]] = []
        self._generator = np.random.default_rng(0)
        self._same_tokens = same_tokens
        self._with_end = with_end

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(text=prompts)["input_ids"]
        completions = [self._completion(prompt) for prompt in prompts]
        tokens = [[*a, *b] for a, b in zip(prompt_ids, completions, strict=True)]
        records = [
            RoutedExperts.from_rows(SCHEMA, foreign_rows(len(ids) - 1, self._generator), ids)
            for ids in tokens
        ]
        self.generations.append(list(zip(tokens, records, strict=True)))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completions,
            "logprobs": [[-1.0] * len(ids) for ids in completions],
            "routed_experts": records,
        }

    def record_of(self, tokens: list[int]) -> RoutedExperts:
        """The one record of these tokens in all generations."""
        (record,) = [r for rollouts in self.generations for t, r in rollouts if t == tokens]
        return record

    def _completion(self, prompt: str) -> list[int]:
        if self._same_tokens:
            return [len(prompt) + 7, 11, 12, EOS]
        length = int(self._generator.integers(3, 8))
        ids = self._generator.integers(1, 2048, length).tolist()
        return [*ids, EOS] if self._with_end and length % 2 else ids


@dataclass
class Pass:
    """One forward of a model: its tokens, and the experts that ran for them."""

    input_ids_BS: torch.Tensor
    attention_mask_BS: torch.Tensor
    has_gradient: bool
    layers: list[torch.Tensor] = field(default_factory=list)
    recomputed: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def sequences(self) -> Iterator[tuple[list[int], np.ndarray]]:
        """Tokens of each line, and the rows of all of them but the last, sorted."""
        return self._sequences(torch.stack(self.layers, 1))

    def recomputed_sequences(self) -> Iterator[tuple[list[int], np.ndarray]]:
        """The same of what ran in backward, where it was the whole."""
        layers = [self.recomputed[layer] for layer in sorted(self.recomputed)]
        assert [len(runs) for runs in layers] == [1] * SCHEMA.num_layers
        return self._sequences(torch.stack([runs[0] for runs in layers], 1))

    def _sequences(self, ids_NLK: torch.Tensor) -> Iterator[tuple[list[int], np.ndarray]]:
        ids_BSLK = ids_NLK.unflatten(0, self.input_ids_BS.shape)
        for tokens_S, mask_S, ids_SLK in zip(
            self.input_ids_BS, self.attention_mask_BS.bool(), ids_BSLK, strict=True
        ):
            yield tokens_S[mask_S].tolist(), ids_SLK[mask_S][:-1].sort(-1).values.numpy()


@contextmanager
def watched(model: nn.Module) -> Iterator[list[Pass]]:
    """All forwards of a model, told by what its experts were given; routers and their top-k are not looked at."""
    passes: list[Pass] = []
    running = [False]

    def begin(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        running[0] = True
        ids = kwargs["input_ids"].clone()
        passes.append(Pass(ids, kwargs["attention_mask"].clone(), torch.is_grad_enabled()))

    def end(module: nn.Module, args: Any, output: Any) -> None:
        running[0] = False

    def ran(layer: int, args: Any) -> None:
        if running[0]:
            passes[-1].layers.append(args[1].clone())
        else:
            passes[-1].recomputed.setdefault(layer, []).append(args[1].clone())

    experts = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
    handles = [
        model.model.register_forward_pre_hook(begin, with_kwargs=True),
        model.model.register_forward_hook(end),
        *(
            module.register_forward_pre_hook(lambda m, args, layer=layer: ran(layer, args))
            for layer, module in enumerate(experts)
        ),
    ]
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()


def sorted_rows(record: RoutedExperts, num_rows: int) -> np.ndarray:
    return np.sort(record.ids_TLK[:num_rows].astype(np.int64), -1)
