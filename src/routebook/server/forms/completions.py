"""The shape of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from routebook.server.forms.base import Form, Part
from routebook.server.json_body import Spliced
from routebook.server.token_texts import as_json_number


class CompletionForm(Form):
    """Texts, in OpenAI's shape of completions."""

    id_prefix = "cmpl-"
    return_token_ids = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._offsets: dict[int, int] = {}

    def answer(self, choices: Sequence[Spliced]) -> dict[str, Any]:
        """See :meth:`Form.answer`."""
        return {**self._event(list(choices)), "usage": self.usage()}

    def _event(self, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model_name,
            "choices": choices,
        }

    def _choice(self, index: int, prompt_index: int, part: Part, *, whole: bool) -> dict[str, Any]:
        return {
            "index": index,
            "text": part.text,
            "logprobs": self.logprobs(index, part),
            **self._end(part),
            **self._token_ids(index, prompt_index, part),
            **self.rows.fields(part.routed_experts),
        }

    def _token_ids(self, index: int, prompt_index: int, part: Part) -> dict[str, Any]:
        if not self.return_token_ids:
            return {}
        # Of a stream, only the first event of a completion has its prompt.
        is_first = self.num_completion_tokens[index] == len(part.token_ids)
        prompt = {"prompt_token_ids": self.job.prompts[prompt_index].token_ids}
        return {"token_ids": part.token_ids, **(prompt if is_first else {})}

    def logprobs(self, index: int, part: Part) -> dict[str, Any] | None:
        """See :meth:`Form.logprobs`."""
        if part.logprobs is None:
            return None
        tokens = [self.texts[entry.token_id] for entry in part.logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": [as_json_number(entry.logprob) for entry in part.logprobs],
            "tokens": tokens,
            "top_logprobs": [
                {
                    self.texts[token_id]: as_json_number(logprob)
                    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob))
                }
                for entry in part.logprobs
            ],
        }
