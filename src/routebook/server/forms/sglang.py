"""The shape of SGLang's `/generate`: one object per completion, a list of them where there are several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from routebook.engine.request import FinishReason
from routebook.server.forms.base import Form, Part
from routebook.server.json_body import Spliced
from routebook.server.token_texts import as_json_number


class SGLangForm(Form):
    """Texts and token ids with `meta_info`. Streams tell texts and token ids from their beginning on, and rows and
    log-probabilities as increments.
    """

    is_list = False
    texts_in_logprobs = False
    weight_version = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._texts: dict[int, str] = {}
        self._token_ids: dict[int, list[int]] = {}

    def answer(self, choices: Sequence[Spliced]) -> Any:
        """See :meth:`Form.answer`."""
        return choices if self.is_list else choices[0]

    def last_event(self) -> None:
        """There is none: each event tells the numbers of tokens."""

    def _event(self, choices: list[Any]) -> dict[str, Any]:
        (choice,) = choices
        value: dict[str, Any] = choice
        return value

    def _choice(self, index: int, prompt_index: int, part: Part, *, whole: bool) -> dict[str, Any]:
        self._texts[index] = self._texts.get(index, "") + part.text
        self._token_ids.setdefault(index, []).extend(part.token_ids)
        meta = {
            "id": self.job.prompt_name(prompt_index),
            "finish_reason": _finish_reason(part, self.num_completion_tokens[index]),
            "prompt_tokens": len(self.job.prompts[prompt_index].token_ids),
            "completion_tokens": self.num_completion_tokens[index],
            "weight_version": str(self.weight_version),
            **(self.logprobs(index, part) or {}),
            **self.rows.fields(part.routed_experts),
        }
        place = {"index": index} if self.is_list and not whole else {}
        return {
            "text": self._texts[index],
            "output_ids": self._token_ids[index],
            "meta_info": meta,
            **place,
        }

    def logprobs(self, index: int, part: Part) -> dict[str, Any] | None:
        """See :meth:`Form.logprobs`."""
        if part.logprobs is None:
            return None
        fields: dict[str, Any] = {
            "output_token_logprobs": [
                self._logprob(entry.token_id, entry.logprob) for entry in part.logprobs
            ]
        }
        if self.job.prompts[0].params.logprobs:
            fields["output_top_logprobs"] = [
                [self._logprob(*pair) for pair in entry.top] for entry in part.logprobs
            ]
        return fields

    def _logprob(self, token_id: int, logprob: float) -> tuple[float, int, str | None]:
        text = self.texts[token_id] if self.texts_in_logprobs else None
        return (as_json_number(logprob), token_id, text)


def _finish_reason(part: Part, num_tokens: int) -> dict[str, Any] | None:
    match part.finish_reason:
        case None:
            return None
        case FinishReason.LENGTH:
            return {"type": "length", "length": num_tokens}
        case FinishReason.STOP:
            return {"type": "stop", "matched": part.stop_reason}
        case _:
            return {"type": "abort", "message": part.stop_reason or "aborted"}
