"""From the ledger's rows to the record that a caller gets."""

from __future__ import annotations

from routebook.engine.request import Request
from routebook.ledger.base import Ledger
from routebook.routes import RoutedExperts


def build_record(ledger: Ledger, request: Request) -> RoutedExperts | None:
    """Rows `[routed_experts_prompt_start, num_rows)` of a finished request, or None if it did not ask.

    A position whose row is not there is marked absent in the record; nothing is filled in.
    """
    if not request.params.routed_experts:
        return None
    if request.earlier is None:
        start = min(request.params.routed_experts_prompt_start, request.num_rows)
        return _read(ledger, request, start)
    # The rows of the run before are those that its tokens were sampled with; only what follows is new.
    earlier = request.earlier
    return (
        earlier.append(_read(ledger, request, earlier.stop))
        if earlier.stop < request.num_rows
        else earlier
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
