"""Prompts whose completions are not all there yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from routebook.engine.detokenizer import Detokenizer
from routebook.engine.increments import CompletionStream, Increment, SharedPrompt
from routebook.engine.outputs import CompletionOutput, RequestOutput
from routebook.engine.record_builder import build_record
from routebook.engine.request import Request
from routebook.engine.sampling_params import SamplingParams
from routebook.ledger import Ledger

_SEED_NBYTES = 7


@dataclass(slots=True)
class OpenPrompt:
    """A prompt with its `n` completions, each of which is a request of the scheduler."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    detokenizers: list[Detokenizer | None]
    streamed: bool = False
    """Whether its completions are handed out in increments, instead of as an output at the end."""
    choices: dict[int, CompletionOutput | None] = field(default_factory=dict)
    """Completions that have ended; of a streamed prompt they are None."""
    increments: list[Increment] = field(default_factory=list)
    """The last increments of ended completions, to be taken."""
    _streams: list[CompletionStream] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.streamed:
            shared = SharedPrompt()
            self._streams = [
                CompletionStream(index, detokenizer, shared)
                for index, detokenizer in enumerate(self.detokenizers)
            ]

    @property
    def has_ended(self) -> bool:
        """Whether all completions have ended."""
        return len(self.choices) == self.params.n

    def child_id(self, index: int) -> str:
        """Id of one completion's request."""
        return f"{self.request_id}.{index}"

    def child_seed(self, index: int) -> int:
        """Seed of one completion: mixed, so that prompts with neighbouring seeds have no completion in common."""
        if index == 0:
            return self.seed
        digest = blake2b(f"{self.seed}.{index}".encode(), digest_size=_SEED_NBYTES).digest()
        return int.from_bytes(digest, "little")

    def open_children(self) -> Iterator[str]:
        """Ids of the completions that have not ended."""
        return (self.child_id(i) for i in range(self.params.n) if i not in self.choices)

    def close(self, request: Request, ledger: Ledger) -> RequestOutput | None:
        """Take over a finished request; returns the prompt's output when it was the last one, and not streamed."""
        assert request.finish_reason is not None
        index = int(request.request_id.rpartition(".")[2])
        if self.streamed:
            last = self._streams[index].take(ledger, request)
            assert last is not None, "a completion ended twice"
            self.increments.append(last)
            self.choices[index] = None
            return None
        self.choices[index] = self._completion(index, request, ledger)
        return self._output() if self.has_ended else None

    def take_increments(self, requests: dict[str, Request], ledger: Ledger) -> list[Increment]:
        """The news of all completions since the last call, lowest index first."""
        news, self.increments = self.increments, []
        # Of open completions the first one comes first: others may leave out what it has handed out.
        open_children = (
            (i, self.child_id(i)) for i in range(self.params.n) if i not in self.choices
        )
        found = (self._streams[i].take(ledger, requests[child_id]) for i, child_id in open_children)
        return sorted(
            [*news, *(increment for increment in found if increment is not None)],
            key=lambda increment: increment.index,
        )

    def _completion(self, index: int, request: Request, ledger: Ledger) -> CompletionOutput:
        assert request.finish_reason is not None
        detokenizer = self.detokenizers[index]
        return CompletionOutput(
            index=index,
            text=detokenizer.text(request.text_token_ids) if detokenizer else "",
            token_ids=tuple(request.output_token_ids),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=tuple(request.logprobs) if request.params.logprobs is not None else None,
            routed_experts=build_record(ledger, request),
        )

    def _output(self) -> RequestOutput:
        choices = [self.choices[index] for index in range(self.params.n)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            choices=tuple(choice for choice in choices if choice is not None),
        )
