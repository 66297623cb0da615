"""The shape of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from routebook.engine.step import TokenLogprobs
from routebook.server.forms.base import OnePromptForm, Part
from routebook.server.json_body import Spliced
from routebook.server.token_texts import TokenTexts, as_json_number


class ChatForm(OnePromptForm):
    """Messages, in OpenAI's shape of chat completions."""

    id_prefix = "chatcmpl-"
    num_likeliest = 0

    def answer(self, choices: Sequence[Spliced]) -> dict[str, Any]:
        """See :meth:`Form.answer`."""
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model_name,
            "choices": choices,
            "usage": self.usage(),
            **self._prompt_fields(),
        }

    def _event(self, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model_name,
            "choices": choices,
            **self._first_fields(),
        }

    def _choice(self, index: int, prompt_index: int, part: Part, *, whole: bool) -> dict[str, Any]:
        is_first = self.num_completion_tokens[index] == len(part.token_ids)
        role = {"role": "assistant"} if whole or is_first else {}
        return {
            "index": index,
            "message" if whole else "delta": {**role, "content": part.text},
            "logprobs": self.logprobs(index, part),
            **self._end(part),
            **({"token_ids": part.token_ids} if self.return_token_ids else {}),
            **self.rows.fields(part.routed_experts),
        }

    def logprobs(self, index: int, part: Part) -> dict[str, Any] | None:
        """See :meth:`Form.logprobs`."""
        if part.logprobs is None:
            return None
        return chat_logprobs(part.logprobs, self.num_likeliest, self.texts)


def chat_logprobs(
    entries: Sequence[TokenLogprobs], num_likeliest: int, texts: TokenTexts
) -> dict[str, Any]:
    """Log-probabilities in OpenAI's shape for chat completions."""
    content = [
        {
            **_logprob(entry.token_id, entry.logprob, texts),
            "top_logprobs": [_logprob(*pair, texts) for pair in entry.top[:num_likeliest]],
        }
        for entry in entries
    ]
    return {"content": content}


def _logprob(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    token = texts[token_id]
    return {"token": token, "logprob": as_json_number(logprob), "bytes": list(token.encode())}
