"""From the ledger's rows to the record that a caller gets."""

from __future__ import annotations

import numpy as np

from routebook.engine.request import Request
from routebook.ledger.base import Ledger
from routebook.routes import RoutedExperts
from routebook.routes.provenance import rows_of_provenance


def build_record(ledger: Ledger, request: Request) -> RoutedExperts | None:
    """Rows `[routed_experts_prompt_start, num_rows)` of a finished request, or None if it did not ask.

    A position whose row is not there is marked absent in the record; nothing is filled in.
    """
    if not request.params.routed_experts:
        return None
    if request.earlier is None:
        start = min(request.params.routed_experts_prompt_start, request.num_rows)
        return _read(ledger, request, start)
    return _continued(ledger, request, request.earlier)


def _continued(ledger: Ledger, request: Request, earlier: RoutedExperts) -> RoutedExperts:
    """The rows of the run before, which its tokens were sampled with; where it has none, those of this run."""
    rows = ledger.read(request.request_id, earlier.start, max(request.num_rows, earlier.stop))
    ids_TLK, origin_T, version_T = rows.ids_TLK, rows.origin_T, rows.version_T
    old_origin_T, old_version_T = rows_of_provenance(
        earlier.provenance, earlier.start, earlier.num_rows
    )
    valid_T = np.flatnonzero(earlier.valid_T)
    ids_TLK[valid_T] = earlier.ids_TLK[valid_T]
    origin_T[valid_T], version_T[valid_T] = old_origin_T[valid_T], old_version_T[valid_T]
    return RoutedExperts.from_rows(
        ledger.schema,
        ids_TLK,
        request.token_ids,
        start=earlier.start,
        origin_T=origin_T,
        version_T=version_T,
    )


def _read(ledger: Ledger, request: Request, start: int) -> RoutedExperts:
    rows = ledger.read(request.request_id, start, request.num_rows)
    return RoutedExperts.from_rows(
        ledger.schema,
        rows.ids_TLK,
        request.token_ids,
        start=start,
        origin_T=rows.origin_T,
        version_T=rows.version_T,
    )
