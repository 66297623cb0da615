"""The forced routes of one step, gathered from the requests that have some.

Legend of shape suffixes: T = tokens of the step, L = MoE layers, K = top-k.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from routebook.capture.forcing import ForcedRoutes
from routebook.engine.input_batch import StepInputs
from routebook.engine.step import ForcedRows
from routebook.engine.transfers import upload
from routebook.routes import RouteSchema


def forced_routes(
    inputs: StepInputs, forced: Mapping[str, ForcedRows], schema: RouteSchema, device: torch.device
) -> ForcedRoutes | None:
    """Routes for the tokens of the step that must take given ones; None if there is no such token."""
    num_tokens = len(inputs.positions_T)
    ids_TLK = np.zeros(schema.shape(num_tokens), np.int64)
    forced_T = np.zeros(num_tokens, np.bool_)
    first_rows = (inputs.counts_R.cumsum() - inputs.counts_R).tolist()
    places = zip(inputs.request_ids, first_rows, inputs.starts_R, inputs.counts_R, strict=True)
    for request_id, first_row, start, count in places:
        rows = forced.get(request_id)
        if rows is not None:
            begin = max(int(start), rows.start)
            stop = min(int(start + count), rows.start + len(rows.valid_T))
            if begin < stop:
                here = slice(first_row + begin - int(start), first_row + stop - int(start))
                there = slice(begin - rows.start, stop - rows.start)
                ids_TLK[here], forced_T[here] = rows.ids_TLK[there], rows.valid_T[there]
    if not forced_T.any():
        return None
    # Rows that are not valid hold ids that no expert has; they are not used, but must be in range.
    ids_TLK[~forced_T] = 0
    return ForcedRoutes(*upload(device, ids_TLK, forced_T))
