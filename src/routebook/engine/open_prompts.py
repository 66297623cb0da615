"""Prompts whose completions are not all there yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from routebook.engine.detokenizer import Detokenizer
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
    detokenizers: list[Detokenizer | None] = field(default_factory=list)
    choices: dict[int, CompletionOutput] = field(default_factory=dict)

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
        """Take over a finished request; returns the prompt's output when it was the last one."""
        assert request.finish_reason is not None
        index = int(request.request_id.rpartition(".")[2])
        detokenizer, token_ids = self.detokenizers[index], tuple(request.output_token_ids)
        self.choices[index] = CompletionOutput(
            index=index,
            text=detokenizer.text(token_ids) if detokenizer else "",
            token_ids=token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=tuple(request.logprobs) if request.params.logprobs is not None else None,
            routed_experts=build_record(ledger, request),
        )
        if len(self.choices) < self.params.n:
            return None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            choices=tuple(self.choices[i] for i in range(self.params.n)),
        )
