"""The lengths of a batch's sequences."""

from __future__ import annotations

from routebook.errors import SpanError


def check_lengths(lengths: tuple[int, ...]) -> None:
    """Check that there are sequences, and none without tokens.

    Raises:
        SpanError: none, or an empty one.
    """
    if not lengths or min(lengths) < 1:
        raise SpanError(
            f"lengths={lengths}: a batch has at least one sequence, and each at least one token;"
            " leave empty ones out"
        )
