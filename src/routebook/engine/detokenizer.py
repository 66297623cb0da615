"""Text of a growing completion, and the search for stop texts in it."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Turns the tokens of one completion into text as they come.

    A token may end inside a character; its text appears with the token that completes the character.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._stop = stop
        self._stream = DecodeStream(skip_special_tokens=True)

    def add(self, token_id: int) -> str | None:
        """Append a token. Returns the stop text that it completed, whose text is then cut off."""
        piece: str | None = self._stream.step(self._tokenizer.backend_tokenizer, token_id)
        if not piece:
            return None
        self.text += piece
        return self._cut_at_stop(len(piece))

    def _cut_at_stop(self, num_new_chars: int) -> str | None:
        """Cut at the earliest stop text that reaches into the last `num_new_chars` characters."""
        found: tuple[int, str] | None = None
        for stop in self._stop:
            at = self.text.find(stop, max(0, len(self.text) - num_new_chars - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = (at, stop)
        if found is None:
            return None
        self.text = self.text[: found[0]]
        return found[1]
