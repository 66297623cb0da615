"""The models that the state machine serves: the tagged-ids fake, and the bundled one in reference mode.

Legend of shape suffixes: T = rows, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from routebook.engine import engine as engine_module
from routebook.engine import executor as executor_module
from routebook.engine import scheduler_factory
from routebook.engine.config import EngineConfig
from routebook.engine.engine import Engine
from routebook.engine.executor_choice import make_executor
from routebook.engine.model_loader import load_pretrained, resolve_model
from routebook.engine.outputs import CompletionOutput
from routebook.engine.weights import Weights
from routebook.ledger import KVSlotConfig, LedgerConfig
from tests.engine.forward_recorder import ForwardRecorder
from tests.engine.late_executor import LateExecutor
from tests.engine.plain_forward import PlainModels
from tests.engine.row_check import Asked, TaggedRows
from tests.engine.tagged_worker import (
    VOCAB,
    WEIGHT,
    TaggedWorker,
    next_token,
)
from tests.engine.witness import Computation, Run, Witness

EXECUTORS = ("inline", "thread", "late")
"""Those of the engine that live in this process, and one that is behind on purpose."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An engine of one example."""

    block_size: int
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_steps_in_flight: int
    ledger: str
    recompute: str
    executor: str
    dtype: str

    def config(self, **more: Any) -> EngineConfig:
        """Options of the engine, its tables so small that they have to grow."""
        return EngineConfig.from_options(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_steps_in_flight=self.max_steps_in_flight,
            ledger=self.ledger,
            recompute=self.recompute,
            executor="inline" if self.executor == "late" else self.executor,
            device="cpu",
            **more,
        )

    def build(self, model: Any, config: EngineConfig) -> Engine:
        """The engine, over ledgers that have little room at first."""
        make = LateExecutor if self.executor == "late" else make_executor
        with (
            patch.object(engine_module, "make_executor", make),
            _options(LedgerConfig, initial_rows=8),
            _options(KVSlotConfig, initial_requests=1),
        ):
            return Engine(model, config)


def _options(kind: type[Any], **more: int) -> Any:
    """Let the engine's ledger start with other options of this kind than the defaults."""
    return patch.object(scheduler_factory, kind.__name__, partial(kind, **more))


class Subject(ABC):
    """A model, and what can be known about it without the engine."""

    vocabulary: range
    """Token ids that prompts are made of."""
    stop_tokens: range
    """Token ids that may end a completion."""
    temperature: float
    dtypes: tuple[str, ...]

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    @abstractmethod
    def start(self) -> Engine:
        """An engine that serves the model."""

    @abstractmethod
    def weights(self, version: int) -> Weights:
        """The weights that become version `version`."""

    @abstractmethod
    def rows_of(self, computations: Sequence[Computation]) -> np.ndarray:
        """Ids `[len(computations), L, K]`."""

    @abstractmethod
    def name(self, row_LK: np.ndarray) -> str:
        """Whose row this is, as far as it can be told."""

    @abstractmethod
    def check_completion(
        self, request_id: str, asked: Asked, choice: CompletionOutput, witness: Witness
    ) -> int:
        """Check what the model alone can tell; returns the rows that it judged."""


class TaggedSubject(Subject):
    """The fake whose rows name their maker. Without a forward of torch it runs a hundred times as many examples."""

    vocabulary = range(1, VOCAB)
    stop_tokens = range(VOCAB)
    temperature = 0.0
    dtypes = ("float32",)

    def start(self) -> Engine:
        with patch.object(executor_module, "Worker", TaggedWorker):
            engine = self.setting.build(object(), self.setting.config())
        self._rows = TaggedRows(engine.executor.worker)  # type: ignore[attr-defined]
        return engine

    def weights(self, version: int) -> Weights:
        return {WEIGHT: torch.tensor(version)}

    def rows_of(self, computations: Sequence[Computation]) -> np.ndarray:
        return self._rows.rows_of(computations)

    def name(self, row_LK: np.ndarray) -> str:
        return self._rows.name(row_LK)

    def check_completion(
        self, request_id: str, asked: Asked, choice: CompletionOutput, witness: Witness
    ) -> int:
        token_ids = list(asked.token_ids)
        for token_id in choice.token_ids:
            assert token_id == next_token(token_ids, witness.seeds[request_id])
            token_ids.append(token_id)
        return 0


class TinySubject(Subject):
    """The bundled model in reference mode.

    Every row is compared with an independent note of what the experts received, in the forward that the witness
    names; in float64 also with forwards of plain transformers over the same tokens.
    """

    vocabulary = range(3, 40)
    stop_tokens = range(2048)
    temperature = 1.0
    dtypes = ("float64", "float64", "float32")

    def start(self) -> Engine:
        dtype = self.setting.dtype
        model, self._plain = _tiny_model(dtype), _plain_models(dtype)
        model.load_state_dict(self._plain.weights(0))
        engine = self.setting.build(model, self.setting.config(reference=True, dtype=dtype))
        self._recorder = ForwardRecorder(engine)
        return engine

    def weights(self, version: int) -> Weights:
        return self._plain.weights(version)

    def rows_of(self, computations: Sequence[Computation]) -> np.ndarray:
        return np.stack([self._row_of(c.maker, c.position, c.forward) for c in computations])

    def name(self, row_LK: np.ndarray) -> str:
        makers = [
            f"request {maker}, position {position}, forward {forward}"
            for (maker, position), rows in self._recorder.computed.items()
            for forward, row in rows
            if np.array_equal(row, row_LK)
        ]
        return " or ".join(makers) or f"no row that was ever computed: {row_LK.tolist()}"

    def check_completion(
        self, request_id: str, asked: Asked, choice: CompletionOutput, witness: Witness
    ) -> int:
        if self.setting.dtype != "float64" or choice.routed_experts is None:
            return 0
        token_ids = [*asked.token_ids, *choice.token_ids]
        forced = asked.earlier if asked.forced else None
        judged = 0
        for run in witness.runs(request_id):
            stop = min(len(run.forwards), len(token_ids) - 1)
            if not stop:
                # Aborted with one token: whatever ran for it, it has no row.
                continue
            versions = [witness.versions[forward] for forward in run.forwards[:stop]]
            plain_TLK = self._plain.rows(token_ids, versions, forced)
            np.testing.assert_array_equal(self._rows_of_run(run, stop), plain_TLK)
            judged += stop
        return judged

    def _rows_of_run(self, run: Run, stop: int) -> np.ndarray:
        return np.stack([self._row_of(run.makers[p], p, run.forwards[p]) for p in range(stop)])

    def _row_of(self, maker: str, position: int, forward: int) -> np.ndarray:
        rows = self._recorder.computed[maker, position]
        return next(row for number, row in rows if number == forward)


@cache
def _tiny_model(dtype: str) -> Any:
    return load_pretrained(resolve_model("tiny"), dtype)


@cache
def _plain_models(dtype: str) -> PlainModels:
    return PlainModels(load_pretrained(resolve_model("tiny"), dtype))
