"""A generation put together from an answer, or from the events of a stream.

Every row is checked where it arrives: rows of a completion follow each other without gap or overlap, each delta's
rows end before the last token known, and rows that carry hashes carry those of these very tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from routebook.client.outputs import Choice, ChoiceDelta, Generation, GenerationChunk
from routebook.client.wire import WireAnswer, WireChoice
from routebook.engine.sampling_params import SamplingParams
from routebook.errors import FormatError, RecordError, ServerError, SpanError
from routebook.routes import RoutedExperts, RouteSchema
from routebook.routes.formats import RouteFormat
from routebook.routes.formats.tokens_after import TokensAfter
from routebook.routes.token_hash import as_token_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A generation that was asked for."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    has_text: bool
    format: RouteFormat
    schema: RouteSchema | None
    """None where the format tells it."""


@dataclass(slots=True)
class _Parts:
    """One completion as far as it is known."""

    token_ids: list[int]
    """Prompt and generated tokens."""
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    records: list[RoutedExperts] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Assembly:
    """Collects what becomes known of the completions of one request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.request_id = request.request_id
        """As the server calls it."""
        self._parts = {
            index: _Parts(list(request.prompt_token_ids)) for index in range(request.params.n)
        }

    @property
    def is_finished(self) -> bool:
        """Whether every completion has ended."""
        return all(parts.finish_reason is not None for parts in self._parts.values())

    def add(self, answer: WireAnswer) -> GenerationChunk:
        """Take an answer or an event.

        Raises:
            ServerError: it tells of an error.
            SpanError: rows that do not follow those before, or other rows than the tokens ask for.
            RecordError: rows of other tokens or of another model, or rows that the format cannot carry.
            FormatError: rows that are not in the format, or completions that were not asked for.
        """
        if answer.error is not None:
            raise ServerError(f"the server gave up on the request: {answer.error.message}")
        self.request_id = answer.request_id or self.request_id
        deltas = tuple(self._add_choice(choice) for choice in answer.choices)
        return GenerationChunk(request_id=self.request_id, choices=deltas)

    def result(self) -> Generation:
        """All completions, whole.

        Raises:
            ServerError: a completion has not ended, or has no rows although they were asked for.
            SpanError: its rows end too early.
        """
        choices = tuple(self._choice(index, parts) for index, parts in self._parts.items())
        return Generation(
            request_id=self.request_id,
            prompt_token_ids=self.request.prompt_token_ids,
            choices=choices,
        )

    def _add_choice(self, choice: WireChoice) -> ChoiceDelta:
        parts = self._parts.get(choice.index)
        if parts is None or parts.finish_reason is not None:
            raise FormatError(
                f"the server sent completion {choice.index}, which was not asked for or had ended"
            )
        token_ids = choice.token_ids or ()
        parts.token_ids.extend(token_ids)
        parts.texts.append(choice.text or "")
        if choice.logprobs is not None:
            parts.logprobs.extend(choice.logprobs.get("content") or ())
        parts.finish_reason = choice.finish_reason
        parts.stop_reason = choice.stop_reason
        return ChoiceDelta(
            index=choice.index,
            text=choice.text,
            token_ids=token_ids,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            logprobs=choice.logprobs,
            routed_experts=self._add_rows(choice, parts),
        )

    def _add_rows(self, choice: WireChoice, parts: _Parts) -> RoutedExperts | None:
        if choice.routed_experts_error is not None:
            raise RecordError(f"completion {choice.index}: {choice.routed_experts_error}")
        if choice.routed_experts is None or not self.request.params.routed_experts:
            return None
        start = self._start_of_rows(choice, parts)
        record = self.request.format.decode_after(
            choice.routed_experts,
            self.request.schema,  # type: ignore[arg-type] # None only where the format tells it
            self._tokens_after(parts, start),
            weight_version=0,
        )
        parts.records.append(record)
        return record

    def _tokens_after(self, parts: _Parts, start: int) -> TokensAfter:
        if not parts.records:
            return TokensAfter.of(parts.token_ids, start)
        token_ids = as_token_ids(parts.token_ids[start:])
        if not len(token_ids):
            raise SpanError(f"rows from position {start} came before their tokens")
        return TokensAfter(token_ids, start, parts.records[-1].last_hash)

    def _start_of_rows(self, choice: WireChoice, parts: _Parts) -> int:
        """Position of the first row in this delta, which must be the one that comes next."""
        first = self.request.params.routed_experts_prompt_start
        expected = parts.records[-1].stop if parts.records else first
        start = choice.routed_experts_start
        if start is None or start == expected:
            return expected
        num_prompt_tokens = len(self.request.prompt_token_ids)
        if choice.index > 0 and not parts.records and first <= start <= num_prompt_tokens:
            return start  # what is left out is shared with the first completion
        raise SpanError(
            f"rows of completion {choice.index} begin at position {start}, but the next one would "
            f"be {expected}; {'some are missing' if start > expected else 'some came twice'}"
        )

    def _choice(self, index: int, parts: _Parts) -> Choice:
        if parts.finish_reason is None:
            raise ServerError(f"the answer broke off: completion {index} has not ended")
        return Choice(
            index=index,
            text="".join(parts.texts) if self.request.has_text else None,
            token_ids=tuple(parts.token_ids[len(self.request.prompt_token_ids) :]),
            finish_reason=parts.finish_reason,
            stop_reason=parts.stop_reason,
            logprobs=self._logprobs(parts),
            routed_experts=self._record(index, parts),
        )

    def _logprobs(self, parts: _Parts) -> dict[str, Any] | None:
        return None if self.request.params.logprobs is None else {"content": parts.logprobs}

    def _record(self, index: int, parts: _Parts) -> RoutedExperts | None:
        num_generated = len(parts.token_ids) - len(self.request.prompt_token_ids)
        if not self.request.params.routed_experts or (not parts.records and not num_generated):
            return None
        if not parts.records:
            raise ServerError(
                f"completion {index} came without routed experts, though they were asked for; does "
                "the server know return_routed_experts, and is capture on?"
            )
        record = RoutedExperts.concat([*self._shared(parts.records[0].start), *parts.records])
        if record.stop != len(parts.token_ids) - 1:
            raise SpanError(
                f"rows of completion {index} end at position {record.stop}, but its "
                f"{len(parts.token_ids)} tokens have rows up to {len(parts.token_ids) - 1}"
            )
        return record

    def _shared(self, start: int) -> list[RoutedExperts]:
        """The rows before `start`, which the first completion has."""
        first = self.request.params.routed_experts_prompt_start
        if start == first:
            return []
        shared = [record for record in self._parts[0].records if record.start < start]
        if not shared or shared[-1].stop < start:
            raise SpanError(f"rows [{first}, {start}) were left out, and not sent before either")
        return [RoutedExperts.concat(shared).truncate(start)]
