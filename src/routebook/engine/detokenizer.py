"""Text of a growing completion, and the search for stop texts in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Text of one completion.

    While there are stop texts to look for, the text follows the tokens as they come; a token may end inside a
    character, whose text then appears with the token that completes it. Otherwise it is made once, at the end.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._stream = DecodeStream(skip_special_tokens=True) if stop else None
        self._text = ""

    def add(self, token_id: int) -> str | None:
        """Append a token. Returns the stop text that it completed, whose text is then cut off."""
        if self._stream is None:
            return None
        piece: str | None = self._stream.step(self._tokenizer.backend_tokenizer, token_id)
        if not piece:
            return None
        self._text += piece
        return self._cut_at_stop(len(piece))

    def text(self, token_ids: Sequence[int]) -> str:
        """The completion's text, given all its tokens; without a stop text and what follows it."""
        if self._stream is not None:
            return self._text
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def _cut_at_stop(self, num_new_chars: int) -> str | None:
        """Cut at the earliest stop text that reaches into the last `num_new_chars` characters."""
        found: tuple[int, str] | None = None
        for stop in self._stop:
            at = self._text.find(stop, max(0, len(self._text) - num_new_chars - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = (at, stop)
        if found is None:
            return None
        self._text = self._text[: found[0]]
        return found[1]
