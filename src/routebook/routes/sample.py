"""A sample: one sequence of tokens with the record of its rows, as a generation leaves it.

Legend of shape suffixes: T = tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from routebook.errors import RecordError
from routebook.routes.record import RoutedExperts
from routebook.routes.token_hash import as_token_ids


@dataclass(frozen=True, kw_only=True, eq=False)
class RouteSample:
    """Prompt and sampled tokens, their rows, and what a reader may want to know about them.

    Raises:
        TokenMismatchError: the rows were computed for other tokens, or are more than the tokens.
        RecordError: a number of prompt tokens that cannot be, or `meta` that is not text.
    """

    record: RoutedExperts
    """Rows of these tokens; the last sampled token has none."""

    token_ids: npt.NDArray[np.int32]
    """int32 `[P + C]`, prompt and sampled tokens from position 0 on; read-only."""

    num_prompt_tokens: int
    """P, at least 1."""

    meta: dict[str, str] = field(default_factory=dict)
    """Free text by name, such as `request_id`, `model`, `model_fingerprint`, `prompt`, `text`."""

    def __post_init__(self) -> None:
        tokens_T = as_token_ids(self.token_ids).view()
        tokens_T.flags.writeable = False
        object.__setattr__(self, "token_ids", tokens_T)
        object.__setattr__(self, "meta", dict(self.meta))
        if not 1 <= self.num_prompt_tokens <= len(tokens_T):
            raise RecordError(
                f"num_prompt_tokens={self.num_prompt_tokens} of {len(tokens_T)} tokens; a sample "
                "begins with at least one prompt token"
            )
        for name, text in self.meta.items():
            if not isinstance(name, str) or not isinstance(text, str):
                raise RecordError(f"meta[{name!r}]={text!r} is not text; convert it with str()")
        self.record.check_tokens(tokens_T)

    @property
    def prompt_token_ids(self) -> npt.NDArray[np.int32]:
        """int32 `[P]`, a read-only view."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def sampled_token_ids(self) -> npt.NDArray[np.int32]:
        """int32 `[C]`, a read-only view."""
        return self.token_ids[self.num_prompt_tokens :]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RouteSample):
            return NotImplemented
        return (
            (self.num_prompt_tokens, self.meta) == (other.num_prompt_tokens, other.meta)
            and np.array_equal(self.token_ids, other.token_ids)
            and self.record == other.record
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Callable[..., RouteSample], tuple[dict[str, Any]]]:
        # Pickling an array loses its read-only flag, so the other side makes the sample anew.
        return _remake, (vars(self),)


def _remake(fields: dict[str, Any]) -> RouteSample:
    return RouteSample(**fields)
