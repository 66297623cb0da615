"""What a shape of answers has to say about a completion, whole or in increments."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from routebook.engine.increments import Increment
from routebook.engine.outputs import CompletionOutput
from routebook.server.job import Job
from routebook.server.json_body import Spliced
from routebook.server.rows import RowsField
from routebook.server.token_texts import TokenTexts

Part = CompletionOutput | Increment
"""A completion, or what became known of it; both have the same fields."""


class Form(ABC):
    """Makes the JSON values of one answer. It may keep in mind what it has said before.

    Args:
        job: the request.
        model_name: name of the model.
        rows: how routed experts are written.
        texts: texts of single tokens.
    """

    id_prefix = ""

    def __init__(self, job: Job, model_name: str, rows: RowsField, texts: TokenTexts) -> None:
        self.job = job
        self.model_name = model_name
        self.rows = rows
        self.texts = texts
        self.created = int(time.time())
        self.num_completion_tokens: dict[int, int] = {}

    @property
    def id(self) -> str:
        """Id of the answer."""
        return self.id_prefix + self.job.name

    def choice(self, prompt_index: int, part: Part) -> Any:
        """The value of one whole completion."""
        return self._choice(self.count(prompt_index, part), prompt_index, part, whole=True)

    def event(self, prompt_index: int, part: Part) -> Any:
        """The event of a stream that tells of an increment."""
        index = self.count(prompt_index, part)
        choice = self._choice(index, prompt_index, part, whole=False)
        event = self._event([choice])
        if self.job.continuous_usage:
            event["usage"] = usage(
                len(self.job.prompts[prompt_index].token_ids), self.num_completion_tokens[index]
            )
        return event

    @abstractmethod
    def answer(self, choices: Sequence[Spliced]) -> Any:
        """The value of the whole answer, of the values of all completions."""

    def last_event(self) -> Any | None:
        """The event with the numbers of tokens, if it was asked for."""
        return {**self._event([]), "usage": self.usage()} if self.job.include_usage else None

    def usage(self) -> dict[str, int]:
        """Numbers of tokens."""
        return usage(self.job.num_prompt_tokens, sum(self.num_completion_tokens.values()))

    @abstractmethod
    def logprobs(self, index: int, part: Part) -> dict[str, Any] | None:
        """The log-probabilities of a completion or an increment, if they were asked for."""

    @abstractmethod
    def _choice(self, index: int, prompt_index: int, part: Part, *, whole: bool) -> Any:
        """The value of a completion or an increment."""

    @abstractmethod
    def _event(self, choices: list[Any]) -> dict[str, Any]:
        """The value of a stream's event."""

    def count(self, prompt_index: int, part: Part) -> int:
        """Index of the completion among those of all prompts; its tokens are counted."""
        index = prompt_index * self.job.prompts[0].params.n + part.index
        known = self.num_completion_tokens.get(index, 0)
        self.num_completion_tokens[index] = known + len(part.token_ids)
        return index

    def _end(self, part: Part) -> dict[str, Any]:
        reason = part.finish_reason
        return {
            "finish_reason": None if reason is None else reason.value,
            "stop_reason": part.stop_reason,
        }


class OnePromptForm(Form):
    """A form whose answers, and first events, may repeat the prompt's token ids."""

    return_token_ids = False
    _is_first = True

    def _prompt_fields(self) -> dict[str, Any]:
        if not self.return_token_ids:
            return {}
        return {"prompt_token_ids": self.job.prompts[0].token_ids}

    def _first_fields(self) -> dict[str, Any]:
        """The same for an event: of a stream only the first one has them."""
        first = self._prompt_fields() if self._is_first else {}
        self._is_first = False
        return first


def usage(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, int]:
    """Numbers of tokens, in OpenAI's shape."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }
