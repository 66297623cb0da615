"""The routes of one forward pass, row by row.

Legend of shape suffixes: B = batch, S = padded length, N = rows of the forward, L = MoE layers, K = top-k, T = rows of
one record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from routebook.errors import ReplayError, SchemaMismatchError, SpanError
from routebook.replay.sequences import ModelCall, Sequences
from routebook.routes import RoutedExperts, RouteSchema

NATIVE = -1
"""In an array of ids: the row has no route and takes the live router's own choice."""

Records = Sequence[RoutedExperts | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class RouteBatch:
    """Which ids every row of a forward takes; rows without a record and padding take the live router's.

    Raises:
        SchemaMismatchError: ids of another shape or type, beyond the experts, or twice in one row.
    """

    schema: RouteSchema
    ids_NLK: torch.Tensor
    """int64; rows that are not forced hold 0."""

    forced_N: torch.Tensor
    """bool: rows that have a route."""

    real_N: torch.Tensor
    """bool: rows that hold a token; the others are padding."""

    def __post_init__(self) -> None:
        _check_ids(self.schema, self.ids_NLK, self.forced_N)
        if (self.forced_N & ~self.real_N).any():
            raise ReplayError("a row of padding has a route; padding takes none")

    @classmethod
    def from_records(
        cls,
        records: Records,
        sequences: Sequences,
        input_ids: torch.Tensor | None = None,
    ) -> RouteBatch:
        """Put the rows of each record where its sequence lies.

        Args:
            records: one per sequence, in the order of the batch; None where there is none.
            sequences: where they lie.
            input_ids: tokens of the batch `[B, S]`, against which the records' token hashes are checked.

        Raises:
            SpanError: a record is longer than its sequence.
            TokenMismatchError: rows were computed for other tokens than those in their place.
            RecordError: records of different schemas, or a row that names an expert twice.
            ReplayError: another number of records than sequences, or no record at all.
        """
        if len(records) != len(sequences.spans):
            raise ReplayError(f"{len(records)} records for {len(sequences.spans)} sequences")
        schemas = {record.schema for record in records if record is not None}
        if len(schemas) != 1:
            raise SchemaMismatchError(
                f"the records of a batch have {len(schemas)} schemas; they must come from one model"
            )
        (schema,) = schemas
        ids_NLK = np.zeros(schema.shape(sequences.num_rows), np.int64)
        forced_N = np.zeros(sequences.num_rows, np.bool_)
        tokens_N = None if input_ids is None else input_ids.detach().cpu().numpy().reshape(-1)
        for index, (record, span) in enumerate(zip(records, sequences.spans, strict=True)):
            if record is None:
                continue
            place = _place_of(index, record, span)
            if tokens_N is not None:
                record.check_tokens(tokens_N[span[0] : sum(span)])
            ids_NLK[place][record.valid_T] = record.ids_TLK[record.valid_T]
            forced_N[place] = record.valid_T
        return cls(
            schema=schema,
            ids_NLK=torch.from_numpy(ids_NLK),
            forced_N=torch.from_numpy(forced_N),
            real_N=torch.from_numpy(sequences.token_mask),
        )

    @classmethod
    def from_ids(
        cls,
        schema: RouteSchema,
        ids: torch.Tensor | npt.NDArray[np.integer],
        real: torch.Tensor | None = None,
    ) -> RouteBatch:
        """Take ids as they lie in the batch; a row that is -1 throughout takes the live router's choice.

        Args:
            schema: what the axes mean.
            ids: `[N, L, K]` or `[B, S, L, K]`, any signed integers.
            real: bool or 0/1, `[N]` or `[B, S]`: rows that hold a token. Without it, all of them.

        Raises:
            SchemaMismatchError: as the class, and a row that is -1 in part.
        """
        given = torch.as_tensor(ids)
        if given.dim() not in (3, 4) or given.is_floating_point() or given.dtype == torch.bool:
            raise SchemaMismatchError(
                f"ids are {given.dtype} of shape {list(given.shape)}; give integers [rows, layers, top_k] "
                "or [batch, length, layers, top_k]"
            )
        ids_NLK = given.flatten(0, -3).long()
        native_NLK = ids_NLK == NATIVE
        native_N = native_NLK.flatten(1).all(1)
        if (native_NLK.flatten(1).any(1) != native_N).any():
            raise SchemaMismatchError(
                "a row is -1 in part; a row has a route in every layer or none"
            )
        real_N = torch.ones_like(native_N) if real is None else real.reshape(-1).bool()
        if real_N.shape != native_N.shape:
            raise SchemaMismatchError(f"{len(real_N)} flags for {len(native_N)} rows of ids")
        ids_NLK = ids_NLK.masked_fill(native_N[:, None, None], 0)
        return cls(schema=schema, ids_NLK=ids_NLK, forced_N=~native_N, real_N=real_N)

    @classmethod
    def of_call(cls, routes: Routes, call: ModelCall, schema: RouteSchema) -> RouteBatch:
        """The batch for one call of the decoder, whichever way the routes were given.

        Raises:
            RoutebookError: they do not fit the call or the model.
        """
        if isinstance(routes, RoutedExperts):
            routes = [routes]
        if isinstance(routes, torch.Tensor | np.ndarray):
            mask = call.attention_mask
            is_plain = isinstance(mask, torch.Tensor) and mask.shape == (call.batch, call.length)
            batch = cls.from_ids(schema, routes, _real(routes, mask) if is_plain else None)
        elif isinstance(routes, RouteBatch):
            batch = routes
        else:
            batch = cls.from_records(routes, call.sequences(len(routes)), call.input_ids_BS)
        if batch.schema != schema:
            raise SchemaMismatchError(f"the routes have {batch.schema}, the model has {schema}")
        if batch.num_rows != call.num_rows:
            raise SchemaMismatchError(
                f"routes for {batch.num_rows} rows in a forward of {call.batch} x {call.length} tokens"
            )
        return batch

    @property
    def num_rows(self) -> int:
        """Rows of the forward, padding included."""
        return len(self.forced_N)

    def to(self, device: torch.device) -> RouteBatch:
        """The same routes on `device`."""
        if self.ids_NLK.device == device:
            return self
        return replace(
            self,
            ids_NLK=self.ids_NLK.to(device),
            forced_N=self.forced_N.to(device),
            real_N=self.real_N.to(device),
        )


Routes = RouteBatch | RoutedExperts | Records | torch.Tensor | npt.NDArray[np.integer]
"""Ways to give the routes of a forward pass."""


def _real(ids: torch.Tensor | npt.NDArray[np.integer], mask: torch.Tensor) -> torch.Tensor:
    return mask.reshape(-1).to(torch.as_tensor(ids).device)


def _place_of(index: int, record: RoutedExperts, span: tuple[int, int]) -> slice:
    """Rows of the batch in which a record's rows lie."""
    first, length = span
    if record.stop > length:
        raise SpanError(
            f"record {index} ends at position {record.stop}, its sequence in the batch has {length} tokens; "
            "truncate the record where the tokens were cut"
        )
    return slice(first + record.start, first + record.stop)


def _check_ids(schema: RouteSchema, ids_NLK: torch.Tensor, forced_N: torch.Tensor) -> None:
    if tuple(ids_NLK.shape) != schema.shape(len(forced_N)) or ids_NLK.dtype != torch.int64:
        raise SchemaMismatchError(
            f"ids are {ids_NLK.dtype} of shape {list(ids_NLK.shape)}; the model takes int64 of shape "
            f"{list(schema.shape(len(forced_N)))}"
        )
    outside_NL = ((ids_NLK < 0) | (ids_NLK >= schema.num_experts)).any(-1) & forced_N[:, None]
    _refuse_first(
        schema, ids_NLK, outside_NL, f"of which one is none of {schema.num_experts} experts"
    )
    twice_NL = torch.zeros_like(outside_NL)
    for apart in range(1, schema.top_k):  # a sort costs several times as much
        twice_NL |= (ids_NLK[..., apart:] == ids_NLK[..., :-apart]).any(-1)
    twice_NL &= forced_N[:, None]
    _refuse_first(schema, ids_NLK, twice_NL, "which name an expert twice")


def _refuse_first(
    schema: RouteSchema, ids_NLK: torch.Tensor, wrong_NL: torch.Tensor, what: str
) -> None:
    if wrong_NL.any():
        row, layer = (int(index) for index in wrong_NL.nonzero()[0])
        raise SchemaMismatchError(
            f"row {row} of the batch, layer {schema.layer_ids[layer]}, has ids "
            f"{ids_NLK[row, layer].tolist()}, {what}; these are not the choices of a router"
        )
