"""The worker's persistent view of its requests: token ids and block tables in two arrays.

Each request has one row of both arrays for as long as the worker holds it. A step then needs no Python loop over
tokens: positions, token ids and slots come from a few fancy reads.

Legend of shape suffixes: R = requests of the step, T = tokens of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from routebook.engine.sampling_params import SamplingParams
from routebook.engine.step import ForcedRows, NewRequestData, SchedulerOutput

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """One step in arrays, in batch order."""

    request_ids: list[str]
    rows_R: IntArray
    """Row of each request in the batch's arrays."""
    starts_R: IntArray
    counts_R: IntArray
    token_ids_T: IntArray
    positions_T: IntArray
    slot_mapping_T: IntArray
    """KV slot of each token: `block_id * block_size + offset`."""
    samples_R: npt.NDArray[np.bool_]
    """Whether the step computes the last known token of the request, so that the next one is sampled."""

    def tokens(self) -> Iterator[StepInputs]:
        """The same step as T steps of one token each, in the same order."""
        requests_T = np.repeat(np.arange(len(self.request_ids)), self.counts_R)
        for t, request in enumerate(requests_T.tolist()):
            yield StepInputs(
                request_ids=[self.request_ids[request]],
                rows_R=self.rows_R[request : request + 1],
                starts_R=self.positions_T[t : t + 1],
                counts_R=np.ones(1, np.int64),
                token_ids_T=self.token_ids_T[t : t + 1],
                positions_T=self.positions_T[t : t + 1],
                slot_mapping_T=self.slot_mapping_T[t : t + 1],
                samples_R=self.samples_R[request : request + 1],
            )


class InputBatch:
    """Token ids, block tables and parameters of the requests that the worker holds."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self.block_table = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.params: dict[str, SamplingParams] = {}
        self.seeds: dict[str, int] = {}
        self.forced: dict[str, ForcedRows] = {}
        self._token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        self._num_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_blocks = np.zeros(max_num_seqs, np.int64)
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._row_of)

    def remove(self, request_ids: list[str]) -> None:
        """Forget requests; their rows become free."""
        for request_id in request_ids:
            self._free_rows.append(self._row_of.pop(request_id))
            del self.params[request_id], self.seeds[request_id]
            self.forced.pop(request_id, None)

    def update(self, step: SchedulerOutput) -> None:
        """Take in new requests and append new blocks."""
        for new in step.new_requests:
            self._add(new)
        for request_id, block_ids in step.new_block_ids.items():
            self._append_blocks(self._row_of[request_id], block_ids)

    def inputs(self, step: SchedulerOutput) -> StepInputs:
        """Lay the step out in the order of its `num_scheduled_tokens`."""
        request_ids = list(step.num_scheduled_tokens)
        rows_R = np.array([self._row_of[request_id] for request_id in request_ids], np.int64)
        counts_R = np.array(list(step.num_scheduled_tokens.values()), np.int64)
        starts_R = np.array([step.num_computed_tokens[r] for r in request_ids], np.int64)
        rows_T, positions_T = _expand(rows_R, starts_R, counts_R)
        blocks_T = self.block_table[rows_T, positions_T // self.block_size].astype(np.int64)
        return StepInputs(
            request_ids=request_ids,
            rows_R=rows_R,
            starts_R=starts_R,
            counts_R=counts_R,
            token_ids_T=self._token_ids[rows_T, positions_T].astype(np.int64),
            positions_T=positions_T,
            slot_mapping_T=blocks_T * self.block_size + positions_T % self.block_size,
            samples_R=starts_R + counts_R == self._num_tokens[rows_R],
        )

    def append_tokens(self, token_ids: dict[str, int]) -> None:
        """Remember sampled tokens, inputs of later steps; a request at the model's limit has none to come."""
        rows_B = np.array([self._row_of[request_id] for request_id in token_ids], np.int64)
        known_B = self._num_tokens[rows_B]
        fits_B = known_B < self._token_ids.shape[1]
        tokens_B = np.array(list(token_ids.values()), np.int32)
        self._token_ids[rows_B[fits_B], known_B[fits_B]] = tokens_B[fits_B]
        self._num_tokens[rows_B[fits_B]] += 1

    def _add(self, new: NewRequestData) -> None:
        row = self._free_rows.pop()
        self._row_of[new.request_id] = row
        self.params[new.request_id] = new.sampling_params
        self.seeds[new.request_id] = new.seed
        if new.forced is not None:
            self.forced[new.request_id] = new.forced
        self._token_ids[row, : len(new.token_ids)] = new.token_ids
        self._num_tokens[row] = len(new.token_ids)
        self._num_blocks[row] = 0
        self._append_blocks(row, new.block_ids)

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        first = self._num_blocks[row]
        self.block_table[row, first : first + len(block_ids)] = block_ids
        self._num_blocks[row] += len(block_ids)


def _expand(rows_R: IntArray, starts_R: IntArray, counts_R: IntArray) -> tuple[IntArray, IntArray]:
    """Row and position of every token of the step."""
    ends_R = counts_R.cumsum()
    if ends_R[-1] == len(counts_R):
        return rows_R, starts_R
    positions_T = np.arange(ends_R[-1]) + np.repeat(starts_R - (ends_R - counts_R), counts_R)
    return np.repeat(rows_R, counts_R), positions_T
