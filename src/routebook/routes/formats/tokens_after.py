"""The tokens that a value's rows belong to, cut off from those before, so that a long stream costs what is new.

Legend of shape suffixes: T = rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from routebook.errors import FormatError, TokenMismatchError
from routebook.routes.token_hash import Hashes, TokenIds, as_token_ids, token_hashes


@dataclass(frozen=True, slots=True)
class TokensAfter:
    """Tokens `[start, N)` of a sequence, of which all but the last have a row."""

    token_ids: npt.NDArray[np.int32]
    """int32 `[N - start]`, at least one."""

    start: int
    """Position of the first row."""

    prefix_hash: int
    """Hash of all tokens before."""

    def __post_init__(self) -> None:
        assert self.start >= 0, self.start
        assert len(self.token_ids), "not even the token after the rows"

    @classmethod
    def of(cls, token_ids: TokenIds, start: int) -> TokensAfter:
        """Those of the tokens from position 0 on.

        Raises:
            FormatError: a start outside the tokens.
            TokenMismatchError: something else than token ids.
        """
        tokens_T = as_token_ids(token_ids)
        if not 0 <= start < len(tokens_T):
            raise FormatError(
                f"start={start} lies outside a sequence of {len(tokens_T)} tokens; pass all tokens, "
                "prompt and sampled, and the position of the first row"
            )
        prefix_hash = int(token_hashes(tokens_T[:start])[-1]) if start else 0
        return cls(tokens_T[start:], start, prefix_hash)

    @property
    def num_rows(self) -> int:
        """Rows `[start, N - 1)`: the last token was not an input yet."""
        return len(self.token_ids) - 1

    @property
    def stop(self) -> int:
        """Position after the last row."""
        return self.start + self.num_rows

    @property
    def num_tokens(self) -> int:
        """N, all tokens of the sequence."""
        return self.start + len(self.token_ids)

    def hashes(self) -> Hashes:
        """uint32 `[T]`: hash of the tokens up to and including each row's."""
        return token_hashes(self.token_ids[:-1], self.start, self.prefix_hash)

    def check(self, token_hash_T: Hashes, prefix_hash: int) -> None:
        """Check that rows which carry hashes were computed for these tokens.

        Args:
            token_hash_T: uint32 `[num_rows]`.
            prefix_hash: hash of the tokens before.

        Raises:
            TokenMismatchError: with the first position that differs.
        """
        if prefix_hash != self.prefix_hash:
            raise TokenMismatchError(
                f"the tokens before position {self.start} are not those that the rows follow"
            )
        differs_T = self.hashes() != token_hash_T
        if differs_T.any():
            row = int(np.flatnonzero(differs_T)[0])
            raise TokenMismatchError(
                f"the row at position {self.start + row} was computed for another token than "
                f"{self.token_ids[row]}"
            )
