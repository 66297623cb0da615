"""Do these rows belong to these tokens? If not: from where on, and by how much do they shift?

Legend of shape suffixes: T = rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from routebook.errors import TokenMismatchError
from routebook.routes.token_hash import Hashes, as_token_ids, token_hashes, token_terms

_SHIFTS = (1, -1, 2, -2, 3, -3, 4, -4)
_LEAST_EVIDENCE = 2


def check_row_tokens(
    token_hash_T: Hashes, prefix_hash: int, start: int, token_ids: npt.ArrayLike
) -> None:
    """Check that rows `[start, start + T)` were computed for these tokens.

    Args:
        token_hash_T: uint32 `[T]`, the hashes that the rows carry.
        prefix_hash: hash of all tokens before `start`.
        start: position of the first row.
        token_ids: ids of the tokens from position 0 on; longer than the rows is fine.

    Raises:
        TokenMismatchError: with the first position that differs, and the shift if there is one.
    """
    tokens_T = as_token_ids(np.asarray(token_ids))
    stop = start + len(token_hash_T)
    if len(tokens_T) < stop:
        raise TokenMismatchError(
            f"the rows end at position {stop}, but there are only {len(tokens_T)} tokens; "
            "pass prompt and completion together, from position 0 on"
        )
    hashes_T = token_hashes(tokens_T[:stop])
    if start and int(hashes_T[start - 1]) != prefix_hash:
        raise TokenMismatchError(
            f"the tokens before position {start} are not those that the rows follow; "
            "pass all tokens from position 0 on, as the engine was given them"
        )
    if not np.array_equal(hashes_T[start:], token_hash_T):
        raise TokenMismatchError(_explain(token_hash_T, prefix_hash, start, tokens_T))


def _explain(
    token_hash_T: Hashes, prefix_hash: int, start: int, tokens_T: npt.NDArray[np.int32]
) -> str:
    """Name the first row whose own token differs, and a shift that fits from there on."""
    own_terms_T = np.diff(token_hash_T, prepend=np.uint32(prefix_hash))
    stop = start + len(token_hash_T)
    terms_T = token_terms(tokens_T[start:stop], start)
    first = start + int(np.flatnonzero(own_terms_T != terms_T)[0])
    message = f"the row at position {first} was computed for another token than {tokens_T[first]}"
    for shift in _SHIFTS:
        if _fits_shifted(own_terms_T[first - start :], first, tokens_T, shift):
            return f"{message}; from there on the rows fit the tokens shifted by {shift:+d}"
    return message


def _fits_shifted(
    own_terms_T: Hashes, first: int, tokens_T: npt.NDArray[np.int32], shift: int
) -> bool:
    """Whether rows from `first` on were computed for the tokens that lie `shift` further.

    Where tokens are missing (a negative shift), the rows of the missing ones are passed over.
    """
    a = first + max(0, -shift)
    b = min(first + len(own_terms_T), len(tokens_T) - shift)
    if b - a < _LEAST_EVIDENCE:
        return False
    return np.array_equal(
        own_terms_T[a - first : b - first], token_terms(tokens_T[a + shift : b + shift], a)
    )
