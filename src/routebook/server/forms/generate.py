"""The shape of `/inference/v1/generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from routebook.server.forms.base import OnePromptForm, Part
from routebook.server.forms.chat import chat_logprobs
from routebook.server.json_body import Spliced
from routebook.server.token_texts import as_json_number, rank_of, sampled_first


class GenerateForm(OnePromptForm):
    """Token ids, and the text if it was asked for."""

    output_mode = "tokens"

    def answer(self, choices: Sequence[Spliced]) -> dict[str, Any]:
        """See :meth:`Form.answer`."""
        return {
            "request_id": self.id,
            "created": self.created,
            "model": self.model_name,
            "output_mode": self.output_mode,
            "choices": choices,
            "usage": self.usage(),
            **self._prompt_fields(),
        }

    def _event(self, choices: list[Any]) -> dict[str, Any]:
        return {
            "request_id": self.id,
            "output_mode": self.output_mode,
            "choices": choices,
            **self._first_fields(),
        }

    def _choice(self, index: int, prompt_index: int, part: Part, *, whole: bool) -> dict[str, Any]:
        text = {"text": part.text} if self.output_mode == "text" else {}
        return {
            "index": index,
            **text,
            **self._end(part),
            "token_ids": part.token_ids,
            "logprobs": self.logprobs(index, part),
            **self.rows.fields(part.routed_experts),
        }

    def logprobs(self, index: int, part: Part) -> dict[str, Any] | None:
        """See :meth:`Form.logprobs`."""
        if part.logprobs is None:
            return None
        num_likeliest = self.job.prompts[0].params.logprobs or 0
        if self.output_mode == "text":
            return chat_logprobs(part.logprobs, num_likeliest, self.texts)
        content = [
            {
                "token_id": entry.token_id,
                "logprob": as_json_number(entry.logprob),
                "rank": rank_of(entry, entry.token_id),
                "top_logprobs": [
                    {
                        "token_id": token_id,
                        "logprob": as_json_number(logprob),
                        "rank": rank_of(entry, token_id),
                    }
                    for token_id, logprob in sampled_first(entry, num_likeliest)
                ],
            }
            for entry in part.logprobs
        ]
        return {"content": content}
