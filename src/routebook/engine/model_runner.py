"""The worker: holds the model and the KV pool, runs a step, and tells what it ran.

Legend of shape suffixes: T = tokens of the step, R = requests of the step, B = sampled requests, V = vocabulary.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from routebook.capture.capturer import Capturer
from routebook.capture.outputs import RoutedExpertsTensors
from routebook.engine.attention import AttentionStep, KVShapeProbe
from routebook.engine.config import CacheConfig
from routebook.engine.forced_step import forced_routes
from routebook.engine.input_batch import InputBatch, StepInputs
from routebook.engine.kept_contexts import KeptContexts
from routebook.engine.kv_pool import KVPool, bytes_per_token
from routebook.engine.mixers import StatefulMixers
from routebook.engine.model_loader import LoadedModel
from routebook.engine.packed_positions import PackedPositions, counts_rows
from routebook.engine.paged_step import PagedStep
from routebook.engine.reference import ReferenceStep
from routebook.engine.running_step import RunningStep
from routebook.engine.sampler import SampledTokens, sample
from routebook.engine.step import SchedulerOutput
from routebook.engine.transfers import OutputStream, upload
from routebook.errors import ConfigError, IntegrityError

_GIB = 2**30
_PROBE_TOKENS = 5


class ModelRunner:
    """Binds capture, sizes the pool, and runs steps."""

    def __init__(
        self, loaded: LoadedModel, *, reference: bool, max_num_batched_tokens: int
    ) -> None:
        self.loaded = loaded
        self._model = loaded.model
        self._reference = reference
        probe = KVShapeProbe()
        self.capturer = Capturer.bind(
            self._model, max_num_batched_tokens, run=lambda model: _probe_forward(model, probe)
        )
        self._kv_shapes = probe.shapes
        self._counts_rows = counts_rows(self._model)
        try:
            self.mixers = StatefulMixers.bind(self._model)
        except BaseException:
            self.capturer.unbind()
            raise
        self._pool: KVPool | None = None
        self._batch: InputBatch | None = None
        self._kept: KeptContexts | None = None
        self._output_stream = OutputStream(loaded.device)

    def num_blocks(self, config: CacheConfig, max_num_seqs: int, max_model_len: int) -> int:
        """KV blocks of the pool: as told, or what fits into the memory limit and can be used at all."""
        if config.num_blocks is not None:
            return config.num_blocks
        per_block = bytes_per_token(self._kv_shapes, self.loaded.dtype) * config.block_size
        useful = max_num_seqs * -(-max_model_len // config.block_size)
        if not per_block:
            return useful
        fitting = int(config.kv_cache_gib * _GIB) // per_block
        if fitting < 1:
            raise ConfigError(
                f"kv_cache_gib={config.kv_cache_gib} holds no KV block of {per_block} bytes"
            )
        return min(useful, fitting)

    def allocate(
        self, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        """Take the memory for keys, values and the batch."""
        self._pool = KVPool(
            self._kv_shapes,
            num_blocks,
            block_size,
            dtype=self.loaded.dtype,
            device=self.loaded.device,
        )
        self._kept = KeptContexts(bytes_per_token(self._kv_shapes, self.loaded.dtype))
        self._batch = InputBatch(max_num_seqs, max_model_len, block_size, self.loaded.device)

    def drop(self, request_ids: list[str]) -> None:
        """Forget requests, with their recurrent states."""
        assert self._batch is not None
        assert self._kept is not None
        self._batch.remove(request_ids)
        if not len(self._batch):
            self._kept.clear()
        if self.mixers is not None:
            for request_id in request_ids:
                self.mixers.drop(request_id)

    def check_idle(self) -> None:
        """Recount what the worker holds when no request lives.

        Raises:
            IntegrityError: a request or a recurrent state is still held.
        """
        held = 0 if self._batch is None else len(self._batch)
        states = 0 if self.mixers is None else self.mixers.num_states
        if held or states:
            raise IntegrityError(
                f"the idle worker holds {held} requests, {states} recurrent states"
            )

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> RunningStep:
        """Run one step and sample the next token of each request whose known tokens are all computed.

        On CUDA it is queued, and nothing here waits for the device.
        """
        assert self._batch is not None
        self.drop(step.dropped_request_ids)
        self._batch.update(step)
        self._clear_new_blocks(step)
        inputs = self._batch.inputs(step)
        forward = self._forward_by_token if self._reference else self._forward
        logits_RV, rows = forward(inputs, capture=step.capture)
        sampled_ids, sampled = self._sample(inputs, logits_RV)
        with self._output_stream.behind_the_step():
            return RunningStep(
                inputs=inputs,
                sampled_ids=sampled_ids,
                sampled=sampled.to_cpu_nonblocking() if sampled is not None else None,
                rows=rows.to_cpu_nonblocking() if rows is not None else None,
                event=self._output_stream.mark(),
            )

    def _clear_new_blocks(self, step: SchedulerOutput) -> None:
        """Wipe what old owners left in the blocks that the step hands out; shared ones stay as they are."""
        assert self._pool is not None
        assert self._batch is not None
        new = [block for blocks in step.new_block_ids.values() for block in blocks]
        for request in step.new_requests:
            num_shared = step.num_computed_tokens[request.request_id] // self._batch.block_size
            new += request.block_ids[num_shared:]
        if new:
            self._pool.clear(new)

    def _forward(
        self, inputs: StepInputs, *, capture: bool
    ) -> tuple[torch.Tensor, RoutedExpertsTensors | None]:
        """Logits `[R, V]` of each request's last token of the step, and the step's rows if wanted."""
        assert self._pool is not None
        assert self._batch is not None
        if self.mixers is not None:
            self.mixers.begin_step(_segments(inputs))
        device = self.loaded.device
        places_T, positions_T, last_rows_R = upload(
            device, inputs.token_places_T, inputs.positions_T, inputs.counts_R.cumsum() - 1
        )
        forced = None
        if self._batch.forced:
            forced = forced_routes(inputs, self._batch.forced, self.capturer.schema, device)
        with self.capturer.armed(len(positions_T), forced) if capture else nullcontext():
            output = self._model(
                input_ids=self._batch.tokens.take(places_T)[None],
                position_ids=positions_T[None],
                past_key_values=PackedPositions(positions_T) if self._counts_rows else None,
                logits_to_keep=last_rows_R,
                use_cache=False,
                routebook_step=self._attention_step(inputs),
            )
        return output.logits[0], self.capturer.snapshot() if capture else None

    def _attention_step(self, inputs: StepInputs) -> AttentionStep:
        pool, batch = self._pool, self._batch
        assert pool is not None
        assert batch is not None
        kind, kept = (ReferenceStep, None) if self._reference else (PagedStep, self._kept)
        return kind(pool, inputs, batch.block_table, batch.block_size, kept)

    def _forward_by_token(
        self, inputs: StepInputs, *, capture: bool
    ) -> tuple[torch.Tensor, RoutedExpertsTensors | None]:
        """The same as :meth:`_forward`, one token at a time; see :mod:`routebook.engine.reference`."""
        results = [self._forward(token, capture=capture) for token in inputs.tokens()]
        last_rows = (inputs.counts_R.cumsum() - 1).tolist()
        logits_RV = torch.cat([results[row][0] for row in last_rows])
        captured = [rows.ids_TLK for _, rows in results if rows is not None]
        return logits_RV, RoutedExpertsTensors(torch.cat(captured)) if capture else None

    def _sample(
        self, inputs: StepInputs, logits_RV: torch.Tensor
    ) -> tuple[list[str], SampledTokens | None]:
        """Sample where all known tokens are computed, and write the tokens where later steps read them."""
        batch = self._batch
        assert batch is not None
        chosen_B = np.flatnonzero(inputs.samples_R)
        if not len(chosen_B):
            return [], None
        request_ids = [inputs.request_ids[r] for r in chosen_B.tolist()]
        places_B = batch.next_places(inputs.rows_R[chosen_B])
        places, chosen = upload(self.loaded.device, places_B, chosen_B)
        sampled = sample(
            logits_RV if len(chosen_B) == len(logits_RV) else logits_RV[chosen],
            [batch.params[request_id] for request_id in request_ids],
            [batch.seeds[request_id] for request_id in request_ids],
            (inputs.starts_R + inputs.counts_R)[chosen_B].tolist(),
        )
        batch.tokens.write(places, sampled.token_ids_B)
        return request_ids, sampled


def _segments(inputs: StepInputs) -> list[tuple[str, int, int, int]]:
    """(request id, first row, rows, position of the first row) in batch order."""
    counts = inputs.counts_R.tolist()
    first_rows = (inputs.counts_R.cumsum() - inputs.counts_R).tolist()
    starts = inputs.starts_R.tolist()
    return list(zip(inputs.request_ids, first_rows, counts, starts, strict=True))


@torch.inference_mode()
def _probe_forward(model: Any, probe: KVShapeProbe) -> None:
    """Run a few tokens as one sequence, so that routers and attention layers show themselves."""
    positions = torch.arange(_PROBE_TOKENS, device=model.device)
    model(
        input_ids=positions[None],
        position_ids=positions[None],
        use_cache=False,
        routebook_step=probe,
    )
