"""What one rank replays: its rows of its layers.

Legend of shape suffixes: T = rows of the rank, L = MoE layers of its chunk, K = top-k.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ABSENT = -1
"""In int64 ids, what marks a row that is padding or absent."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankRows:
    """Ids for the routers of one model chunk, in the order in which they see the rows."""

    ids_TLK: npt.NDArray[np.integer]
    """`[T, L, K]`. int64 with -1 in all picks of a row that is not valid; or the schema's own dtype, in which
    such a row holds `schema.absent`, which may be an expert: there only `valid_T` tells."""

    valid_T: npt.NDArray[np.bool_]
    """bool `[T]`: rows to replay. The others, padding and absent ones alike, need the live router."""

    padding_T: npt.NDArray[np.bool_]
    """bool `[T]`: rows of no token, which no statistics of load may count."""

    layer_ids: tuple[int, ...]
    """Decoder layer of each entry of the layer axis, counted from 0; may be empty."""
