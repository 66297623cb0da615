"""Text of a growing completion, and the search for stop texts in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from routebook.engine.sampling_params import SamplingParams


class Detokenizer:
    """Text of one completion.

    While there are stop texts to look for, or somebody who reads along, the text follows the tokens as they come; a
    token may end inside a character, whose text then appears with the token that completes it. Otherwise it is made
    once, at the end.

    Args:
        tokenizer: the model's, of transformers.
        params: texts that end the completion, and what of them and of special tokens is kept.
        streamed: whether the text is taken in pieces, with :meth:`take`.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, *, streamed: bool = False) -> None:
        self._tokenizer = tokenizer
        self._stop = params.stop
        self._keeps_stop = params.include_stop_text
        self._skips_special = params.skip_special_tokens
        self._stream: DecodeStream | None = None
        if params.stop or streamed:
            self._stream = DecodeStream(skip_special_tokens=params.skip_special_tokens)
        self._text = ""
        self._num_taken = 0

    def add(self, token_id: int) -> str | None:
        """Append a token. Returns the stop text that it completed; what follows it is cut off, and itself too."""
        if self._stream is None:
            return None
        piece: str | None = self._stream.step(self._tokenizer.backend_tokenizer, token_id)
        if not piece:
            return None
        self._text += piece
        return self._cut_at_stop(len(piece))

    def text(self, token_ids: Sequence[int]) -> str:
        """The completion's text, given all its tokens; without what follows a stop text."""
        if self._stop:
            return self._text
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)
        return text

    def take(self) -> str:
        """What was added since the last call, but for an end that may be the beginning of a stop text."""
        return self._take_until(self._text[: len(self._text) - self._num_held_back()])

    def take_rest(self, token_ids: Sequence[int]) -> str:
        """What is left when the completion has ended, so that all pieces joined are its text."""
        text = self.text(token_ids)
        # Some decoders write a token differently once they see what follows it.
        return self._take_until(text if text.startswith(self._text) else self._text)

    def _take_until(self, text: str) -> str:
        piece = text[self._num_taken :]
        self._num_taken += len(piece)
        return piece

    def _num_held_back(self) -> int:
        """Length of the longest end of the text with which a stop text begins; 0 where those are kept."""
        if self._keeps_stop:
            return 0
        return max(
            (
                length
                for stop in self._stop
                for length in range(1, min(len(stop), len(self._text) + 1))
                if self._text.endswith(stop[:length])
            ),
            default=0,
        )

    def _cut_at_stop(self, num_new_chars: int) -> str | None:
        """Cut at the earliest stop text that reaches into the last `num_new_chars` characters."""
        found: tuple[int, str] | None = None
        for stop in self._stop:
            at = self._text.find(stop, max(0, len(self._text) - num_new_chars - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = (at, stop)
        if found is None:
            return None
        at, stop = found
        self._text = self._text[: at + len(stop) if self._keeps_stop else at]
        return stop
