"""Chained hashes of KV blocks: equal hashes mean equal tokens in the block and in all blocks before it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

_DIGEST_NBYTES = 16


def extend_block_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, root: bytes = b""
) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` does not have yet.

    Chains that start from another `root` have no hash in common.
    """
    for index in range(len(hashes), len(token_ids) // block_size):
        parent = hashes[-1] if hashes else root
        block = np.asarray(token_ids[index * block_size : (index + 1) * block_size], np.int64)
        hashes.append(blake2b(parent + block.tobytes(), digest_size=_DIGEST_NBYTES).digest())
