"""From the ledger's rows to the records that a caller gets, whole or piece by piece."""

from __future__ import annotations

import numpy as np

from routebook.engine.request import Request
from routebook.ledger.base import Ledger, RowRange
from routebook.routes import RoutedExperts, RouteSchema
from routebook.routes.provenance import ABSENT, provenance_of_rows, rows_of_provenance
from routebook.routes.token_hash import Hashes


def build_record(ledger: Ledger, request: Request) -> RoutedExperts | None:
    """Rows `[first_row, num_rows)` of a finished request, or None if it did not ask.

    A position whose row is not there is marked absent in the record; nothing is filled in.
    """
    if not request.params.routed_experts:
        return None
    rows = read_rows(ledger, request, first_row(request), last_row(request))
    return RoutedExperts.from_rows(
        ledger.schema,
        rows.ids_TLK,
        request.token_ids,
        start=rows.start,
        origin_T=rows.origin_T,
        version_T=rows.version_T,
    )


def first_row(request: Request) -> int:
    """Position of the first row that the request is given."""
    if request.earlier is not None:
        return request.earlier.start
    return min(request.params.routed_experts_prompt_start, request.num_rows)


def last_row(request: Request) -> int:
    """Position behind the last row known: one for each token but the last, and those of the run before."""
    return max(request.num_rows, request.earlier.stop if request.earlier is not None else 0)


def read_rows(ledger: Ledger, request: Request, start: int, stop: int) -> RowRange:
    """Rows `[start, stop)`: of a continued request those that it had before, then those of this run."""
    rows = ledger.read(request.request_id, start, stop)
    if request.earlier is not None:
        _keep_earlier(rows, request.earlier)
    return rows


def join_rows(
    schema: RouteSchema, rows: RowRange, prefix_hash: int, token_hash_T: Hashes
) -> RoutedExperts:
    """A record of rows that follow others.

    Args:
        schema: the model's.
        rows: any range of a request's rows.
        prefix_hash: hash of the tokens before `rows.start`.
        token_hash_T: hashes of the tokens of the rows, see :func:`token_hashes`.
    """
    return RoutedExperts(
        schema=schema,
        ids_TLK=rows.ids_TLK,
        start=rows.start,
        valid_T=rows.origin_T != ABSENT,
        provenance=provenance_of_rows(rows.origin_T, rows.version_T, rows.start),
        prefix_hash=prefix_hash,
        token_hash_T=token_hash_T,
    )


def _keep_earlier(rows: RowRange, earlier: RoutedExperts) -> None:
    """The rows of the run before, which its tokens were sampled with, replace those of this run."""
    start = max(rows.start, earlier.start)
    stop = min(rows.start + len(rows.ids_TLK), earlier.stop)
    if start >= stop:
        return
    kept = earlier.slice(start, stop)
    origin_T, version_T = rows_of_provenance(kept.provenance, start, kept.num_rows)
    valid_T = np.flatnonzero(kept.valid_T)
    at_T = valid_T + (start - rows.start)
    rows.ids_TLK[at_T] = kept.ids_TLK[valid_T]
    rows.origin_T[at_T], rows.version_T[at_T] = origin_T[valid_T], version_T[valid_T]
