"""What an endpoint has understood of a request."""

from __future__ import annotations

from dataclasses import dataclass

from routebook.engine.sampling_params import SamplingParams
from routebook.server.engine_thread import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPrompt:
    """One prompt of a request."""

    token_ids: list[int]
    params: SamplingParams
    text: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The prompts of one request, and how their completions are handed out."""

    name: str
    """By which the client may abort it."""
    prompts: list[JobPrompt]
    cache_salt: str = ""
    """Prefixes are shared only among requests of the same salt."""
    stream: bool = False
    frames: bool = False
    """Whether the answer is a stream of binary frames instead of JSON."""
    include_usage: bool = False
    """Whether a stream ends with the numbers of tokens."""
    continuous_usage: bool = False
    """Whether every event of a stream has the numbers of tokens so far."""

    def prompt_name(self, index: int) -> str:
        """By which the engine knows a prompt."""
        return self.name if len(self.prompts) == 1 else f"{self.name}-{index}"

    def engine_prompt(self, index: int) -> Prompt:
        """A prompt as the engine takes it."""
        prompt = self.prompts[index]
        return Prompt(
            name=self.prompt_name(index),
            token_ids=prompt.token_ids,
            params=prompt.params,
            text=prompt.text,
            cache_salt=self.cache_salt,
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def is_laborious(self) -> bool:
        """Whether encoding the answer takes more than a moment."""
        params = self.prompts[0].params
        return self.frames or params.routed_experts or params.logprobs is not None
