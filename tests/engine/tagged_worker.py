"""A fake worker whose expert ids say who computed them, and whose keys and values are the tokens themselves.

The ids of a row are `[request, position, layer, forward]`, each in its own quarter of 65,536 experts, so a shifted,
swapped or stale row names itself. The next token depends on all that is read through the block table, so keys and
values of somebody else show up as wrong tokens. Batch and capture buffer are the engine's own; only the model between
them is replaced.

Legend of shape suffixes: T = tokens of the step, R = requests of the step, L = MoE layers, K = top-k.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from routebook.capture.buffer import CaptureBuffer
from routebook.capture.forcing import ForcedRoutes
from routebook.engine.config import EngineConfig
from routebook.engine.forced_step import forced_routes
from routebook.engine.input_batch import InputBatch, StepInputs
from routebook.engine.served_model import ServedModel
from routebook.engine.step import ModelRunnerOutput, SchedulerOutput, SideOutputs
from routebook.engine.weights import Weights
from routebook.errors import IntegrityError
from routebook.routes.schema import RouteSchema

LAYERS = (1, 2, 4)
QUARTER = 16384
SCHEMA = RouteSchema(layer_ids=LAYERS, num_experts=4 * QUARTER, top_k=4, num_hidden_layers=6)
VOCAB = 17
EOS = 0
MOST_COMPLETIONS = 4
"""Completions of one prompt at most, so that each has a number."""
WEIGHT = "version"
"""The only parameter of the fake model: the number of its weights."""

_OFFSETS_LK = np.arange(4) * QUARTER + np.array([[0, 0, layer, 0] for layer in LAYERS])
_EMPTY = -1
_CPU = torch.device("cpu")


def tagged_rows(
    numbers_T: npt.ArrayLike, positions_T: npt.ArrayLike, forwards_T: npt.ArrayLike
) -> npt.NDArray[np.int64]:
    """Ids `[T, L, 4]` that requests of these numbers make at these positions in these forwards."""
    tags_T4 = np.stack(np.broadcast_arrays(numbers_T, positions_T, 0, forwards_T), axis=-1)
    ids_TLK: npt.NDArray[np.int64] = tags_T4[:, None] + _OFFSETS_LK
    return ids_TLK


def name_of_row(row_LK: np.ndarray) -> str:
    """Who made a row, as its ids tell."""
    request, position, layer, forward = (row_LK.astype(int) - np.arange(4) * QUARTER).T
    if any(len(set(column)) > 1 for column in (request, position, forward)):
        return f"no row of one computation: {row_LK.tolist()}"
    name = f"{request[0] // MOST_COMPLETIONS}.{request[0] % MOST_COMPLETIONS}"
    return f"request {name}, position {position[0]}, forward {forward[0]}, layers {layer.tolist()}"


def number_of(request_id: str) -> int:
    """One number for `prompt.completion`."""
    prompt, _, index = request_id.partition(".")
    return int(prompt) * MOST_COMPLETIONS + int(index)


def next_token(token_ids: Sequence[int], seed: int) -> int:
    """What the fake model samples after these tokens."""
    return _sampled(tuple(p * VOCAB + token for p, token in enumerate(token_ids)), seed)


def _sampled(context: tuple[int, ...], seed: int) -> int:
    return hash((seed, context)) % VOCAB


class TaggedWorker:
    """Stands in for :class:`routebook.engine.worker.Worker`.

    Args:
        model: not used: there is only this one.
        config: options of the components; `num_blocks` must be set.
    """

    def __init__(self, model: object, config: EngineConfig) -> None:
        num_blocks = config.cache.num_blocks
        assert num_blocks is not None
        self._num_blocks, self._block_size = num_blocks, config.cache.block_size
        self._max_model_len = num_blocks * self._block_size
        self._batch = InputBatch(
            config.scheduler.max_num_seqs, self._max_model_len, self._block_size, _CPU
        )
        self._buffer = CaptureBuffer(SCHEMA, config.scheduler.max_num_batched_tokens, _CPU)
        self._contents = [_EMPTY] * self._max_model_len
        """Per slot what was written: position and token in one number."""
        self.shuffle = random.Random(0)
        self._num_forwards = 0
        self._staged = self.version = 0
        self.forced: dict[tuple[int, str, int], np.ndarray] = {}
        """(forward, request, position) -> ids that were taken instead of the model's own."""

    def describe(self) -> ServedModel:
        return ServedModel(
            name="tagged",
            fingerprint=str(self.version),
            dtype="float32",
            schema=SCHEMA,
            vocab_size=VOCAB,
            eos_token_ids=frozenset({EOS}),
            is_recurrent=False,
            unforcible=None,
            max_model_len=self._max_model_len,
            num_blocks=self._num_blocks,
        )

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step in an order of the worker's own, which nobody but it can know."""
        order = list(step.num_scheduled_tokens)
        self.shuffle.shuffle(order)
        step = replace(step, num_scheduled_tokens={r: step.num_scheduled_tokens[r] for r in order})
        self._batch.remove(step.dropped_request_ids)
        self._batch.update(step)
        self._clear_new_blocks(step)
        inputs = self._batch.inputs(step)
        self._write(inputs)
        side = SideOutputs()
        if step.capture:
            self._capture(inputs)
            side = SideOutputs(routed_experts=self._buffer.snapshot().tolists())
        sampled = self._sample(inputs)
        self._num_forwards += 1
        return ModelRunnerOutput(
            request_ids=inputs.request_ids,
            starts_R=inputs.starts_R,
            counts_R=inputs.counts_R,
            sampled_token_ids=sampled,
            logprobs={},
            side=side,
        )

    def launch(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Run a step; its result is there at once."""
        launched: Future[ModelRunnerOutput] = Future()
        launched.set_result(self.execute(step))
        return launched

    def drop(self, request_ids: list[str]) -> None:
        self._batch.remove(request_ids)

    def check_idle(self) -> None:
        if len(self._batch):
            raise IntegrityError(f"the idle worker holds {len(self._batch)} requests")

    def stage_weights(self, source: str | Weights) -> None:
        assert not isinstance(source, str)
        self._staged = int(source[WEIGHT])

    def commit_weights(self) -> str:
        self.version = self._staged
        return str(self.version)

    def close(self) -> None:
        """Nothing to give back."""

    def _clear_new_blocks(self, step: SchedulerOutput) -> None:
        new = [block for blocks in step.new_block_ids.values() for block in blocks]
        for request in step.new_requests:
            num_hits = step.num_computed_tokens[request.request_id] // self._block_size
            new += request.block_ids[num_hits:]
        for block in new:
            first = block * self._block_size
            self._contents[first : first + self._block_size] = [_EMPTY] * self._block_size

    def _write(self, inputs: StepInputs) -> None:
        """All keys and values of a step are written before any is read, as in the real attention."""
        token_ids_T = self._batch.tokens.take(torch.from_numpy(inputs.token_places_T)).numpy()
        contents_T = (inputs.positions_T * VOCAB + token_ids_T).tolist()
        for slot, content in zip(inputs.slot_mapping_T.tolist(), contents_T, strict=True):
            self._contents[slot] = content

    def _capture(self, inputs: StepInputs) -> None:
        num_tokens = len(inputs.positions_T)
        numbers_R = [number_of(request_id) for request_id in inputs.request_ids]
        numbers_T = np.repeat(numbers_R, inputs.counts_R)
        ids_TLK = torch.from_numpy(tagged_rows(numbers_T, inputs.positions_T, self._num_forwards))
        if self._batch.forced:
            forced = forced_routes(inputs, self._batch.forced, SCHEMA, _CPU)
            if forced is not None:
                self._force(inputs, ids_TLK, forced)
        self._buffer.begin(num_tokens)
        for layer, ids_TK in enumerate(ids_TLK.unbind(1)):
            self._buffer.capture(layer, ids_TK)

    def _force(self, inputs: StepInputs, ids_TLK: torch.Tensor, forced: ForcedRoutes) -> None:
        ids_TLK[forced.forced_N] = forced.ids_NLK[forced.forced_N]
        makers_T = np.repeat(inputs.request_ids, inputs.counts_R).tolist()
        for t in forced.forced_N.nonzero()[:, 0].tolist():
            place = (self._num_forwards, makers_T[t], int(inputs.positions_T[t]))
            self.forced[place] = ids_TLK[t].numpy()

    def _sample(self, inputs: StepInputs) -> dict[str, int]:
        sampled = {}
        sampling_B = np.flatnonzero(inputs.samples_R)
        for r in sampling_B.tolist():
            request_id = inputs.request_ids[r]
            num_tokens = int(inputs.starts_R[r] + inputs.counts_R[r])
            blocks = self._batch.block_table[inputs.rows_R[r]].tolist()
            context: list[int] = []
            for block in blocks[: -(-num_tokens // self._block_size)]:
                first = block * self._block_size
                context += self._contents[first : first + self._block_size]
            sampled[request_id] = _sampled(
                tuple(context[:num_tokens]), self._batch.seeds[request_id]
            )
        if sampled:
            places = torch.from_numpy(self._batch.next_places(inputs.rows_R[sampling_B]))
            self._batch.tokens.write(places, torch.tensor(list(sampled.values())))
        return sampled
