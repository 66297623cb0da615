"""The worker's persistent view of its requests: token ids and block tables in two arrays.

Each request has one row of both arrays for as long as the worker holds it. A step then needs no Python loop over
tokens: positions, slots and the places of token ids come from a few fancy reads. The block table is the host's, the
token ids are the device's (`token_table.py`).

Legend of shape suffixes: R = requests of the step, T = tokens of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from routebook.engine.sampling_params import SamplingParams
from routebook.engine.step import ForcedRows, NewRequestData, SchedulerOutput
from routebook.engine.token_table import TokenTable

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """One step in arrays, in batch order."""

    request_ids: list[str]
    generation: int
    """Changes whenever a request joins or leaves the batch."""
    rows_R: IntArray
    """Row of each request in the batch's arrays."""
    starts_R: IntArray
    counts_R: IntArray
    token_places_T: IntArray
    """Where each token lies in the token table."""
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
                generation=self.generation,
                rows_R=self.rows_R[request : request + 1],
                starts_R=self.positions_T[t : t + 1],
                counts_R=np.ones(1, np.int64),
                token_places_T=self.token_places_T[t : t + 1],
                positions_T=self.positions_T[t : t + 1],
                slot_mapping_T=self.slot_mapping_T[t : t + 1],
                samples_R=self.samples_R[request : request + 1],
            )


class InputBatch:
    """Token ids, block tables and parameters of the requests that the worker holds."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self._generation = 0
        max_blocks = -(-max_model_len // block_size)
        self.block_table = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.params: dict[str, SamplingParams] = {}
        self.seeds: dict[str, int] = {}
        self.forced: dict[str, ForcedRows] = {}
        self.tokens = TokenTable(max_num_seqs, max_model_len, device)
        self._num_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_blocks = np.zeros(max_num_seqs, np.int64)
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._row_of)

    def remove(self, request_ids: list[str]) -> None:
        """Forget requests; their rows become free."""
        self._generation += bool(request_ids)
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
            generation=self._generation,
            rows_R=rows_R,
            starts_R=starts_R,
            counts_R=counts_R,
            token_places_T=rows_T * self.tokens.row_length + positions_T,
            positions_T=positions_T,
            slot_mapping_T=blocks_T * self.block_size + positions_T % self.block_size,
            samples_R=starts_R + counts_R == self._num_tokens[rows_R],
        )

    def next_places(self, rows_B: IntArray) -> IntArray:
        """Places of the next tokens of these rows, which count as known from now on."""
        known_B = self._num_tokens[rows_B]
        self._num_tokens[rows_B] = known_B + 1
        places_B: IntArray = rows_B * self.tokens.row_length + known_B
        return places_B

    def _add(self, new: NewRequestData) -> None:
        self._generation += 1
        row = self._free_rows.pop()
        self._row_of[new.request_id] = row
        self.params[new.request_id] = new.sampling_params
        self.seeds[new.request_id] = new.seed
        if new.forced is not None:
            self.forced[new.request_id] = new.forced
        self.tokens.put(row, new.token_ids)
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
