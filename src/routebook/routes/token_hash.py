"""A rolling hash of token ids, by which a consumer checks that rows and tokens belong together.

The hash of tokens `0..t` is the sum over `i <= t` of `mix(i, token_i)` modulo 2**32, where `mix` is
the low half of a 64-bit finaliser over position and token. A sum is what makes it one vectorised
pass, and continuable: the 32-bit value at `t` is all that is needed to hash the tokens after `t`.
The position is part of each term, so tokens that swapped places or moved by one do not cancel out.
It finds mistakes; it does not resist an adversary.

Legend of shape suffixes: T = tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from routebook.errors import TokenMismatchError

TokenIds = Sequence[int] | npt.NDArray[np.integer]
Hashes = npt.NDArray[np.uint32]

_MAX_TOKEN = 2**31 - 1


def as_token_ids(token_ids: TokenIds) -> npt.NDArray[np.int32]:
    """Token ids as int32 `[T]`; a view where the input is one already.

    Raises:
        TokenMismatchError: not one axis of integers in `[0, 2**31)`.
    """
    array = np.asarray(token_ids)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TokenMismatchError(
            f"token ids must be one axis of integers, not {array.dtype} of shape {array.shape}"
        )
    if array.min() < 0 or array.max() > _MAX_TOKEN:
        position = int(np.flatnonzero((array < 0) | (array > _MAX_TOKEN))[0])
        raise TokenMismatchError(
            f"token id {array[position]} at position {position} is outside [0, 2**31); "
            "pass the ids that the model was given"
        )
    return array.astype(np.int32, copy=False)


def token_terms(token_ids: TokenIds, start: int = 0) -> Hashes:
    """What each of the tokens at `start, start + 1, ...` adds to the hash: uint32 `[T]`."""
    tokens_T = as_token_ids(token_ids).astype(np.uint64)
    positions_T = np.arange(start, start + len(tokens_T), dtype=np.uint64)
    return _mix((positions_T << np.uint64(32)) | tokens_T).astype(np.uint32)


def token_hashes(token_ids: TokenIds, start: int = 0, prefix_hash: int = 0) -> Hashes:
    """Hash of all tokens up to and including each token.

    Args:
        token_ids: ids of the tokens at positions `start, start + 1, ...`, each in `[0, 2**31)`.
        start: position of the first one.
        prefix_hash: hash of the tokens before `start`: the value of their last one, or 0 if none.

    Returns:
        uint32 `[T]`; entry `t` covers tokens `0..start + t`.

    Raises:
        TokenMismatchError: a token id is negative or too large.
    """
    hashes_T = np.cumsum(token_terms(token_ids, start), dtype=np.uint32)
    return hashes_T + np.uint32(prefix_hash)


def _mix(x_T: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64: a bijection in which each input bit reaches each output bit."""
    x_T = x_T + np.uint64(0x9E3779B97F4A7C15)
    x_T = (x_T ^ (x_T >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_T = (x_T ^ (x_T >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_T ^ (x_T >> np.uint64(31))
