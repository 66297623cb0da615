"""Expert load: how often each expert of each layer was chosen, and how evenly.

Legend of shape suffixes: T = rows, L = MoE layers, K = top-k, E = experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from routebook.errors import RecordError, SchemaMismatchError
from routebook.routes.record import RoutedExperts, RouteIds
from routebook.routes.schema import RouteSchema

Floats = npt.NDArray[np.float64]

_BLOCK_ROWS = 4096
"""Rows counted at a time: counting widens ids to 8 bytes, a whole sample would take 100s of MB."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertLoad:
    """Counts of choices over some rows, at least one, and measures of their balance."""

    schema: RouteSchema
    num_rows: int
    """Valid rows that were counted."""

    counts_LE: npt.NDArray[np.int64]
    """int64 `[L, E]`: how often each expert was chosen; a layer's sum is `num_rows * top_k`."""

    @property
    def share(self) -> Floats:
        """Fraction of a layer's choices, `[L, E]`; 1 / num_experts each when balanced."""
        return self.counts_LE / (self.num_rows * self.schema.top_k)

    @property
    def entropy(self) -> Floats:
        """Entropy of a layer's choices in bits, `[L]`; log2(num_experts) when balanced."""
        share_LE = self.share
        log_LE = np.log2(share_LE, where=share_LE > 0, out=np.zeros_like(share_LE))
        # The sum of a single certain choice is -0.0, which prints badly.
        return _floats(np.abs((share_LE * log_LE).sum(axis=1)))

    @property
    def relative_entropy(self) -> Floats:
        """Entropy as a fraction of log2(num_experts), `[L]`; 1 when balanced, or with 1 expert."""
        if self.schema.num_experts == 1:
            return np.ones(self.schema.num_layers)
        return _floats(self.entropy / np.log2(self.schema.num_experts))

    @property
    def busiest_share(self) -> Floats:
        """Share of the most chosen expert of each layer, `[L]`; at most 1 / top_k."""
        return _floats(self.share.max(axis=1))

    @property
    def variation(self) -> Floats:
        """Coefficient of variation of a layer's counts, `[L]`: deviation / mean; 0 if balanced."""
        return _floats(self.counts_LE.std(axis=1) / self.counts_LE.mean(axis=1))


def expert_load(records: RoutedExperts | Iterable[RoutedExperts]) -> ExpertLoad:
    """Count the choices of all valid rows.

    Args:
        records: one record or many of one schema.

    Raises:
        SchemaMismatchError: the schemas differ.
        RecordError: there is no valid row at all.
    """
    if isinstance(records, RoutedExperts):
        records = [records]
    schema: RouteSchema | None = None
    num_rows = 0
    counts_LE = np.zeros((0, 0), np.int64)
    for record in records:
        if schema is None:
            schema = record.schema
            counts_LE = np.zeros((schema.num_layers, schema.num_experts), np.int64)
        if record.schema != schema:
            raise SchemaMismatchError(f"a record has {record.schema}, those before {schema}")
        num_rows += int(record.valid_T.sum())
        _add_counts(counts_LE, record)
    if schema is None or not num_rows:
        raise RecordError("no valid row to count; pass records that hold some")
    return ExpertLoad(schema=schema, num_rows=num_rows, counts_LE=counts_LE)


def _add_counts(counts_LE: npt.NDArray[np.int64], record: RoutedExperts) -> None:
    for at in range(0, record.num_rows, _BLOCK_ROWS):
        rows = slice(at, at + _BLOCK_ROWS)
        _add_block(counts_LE, record.ids_TLK[rows][record.valid_T[rows]])


def _add_block(counts_LE: npt.NDArray[np.int64], ids_TLK: RouteIds) -> None:
    num_layers, num_experts = counts_LE.shape
    offsets_L1 = np.arange(num_layers)[:, None] * num_experts
    flat = (ids_TLK + offsets_L1).reshape(-1)
    counts_LE += np.bincount(flat, minlength=counts_LE.size).reshape(counts_LE.shape)


def _floats(array: npt.ArrayLike) -> Floats:
    return np.asarray(array, np.float64)
